"""Which engines serve, under which roles, labels and models; and what brings one back."""

from __future__ import annotations

import asyncio
import json

import pytest
from engine_process import EngineProcess
from router_process import RouterProcess
from router_process import until as until_process
from waiting import until

from engine.protocol import BadAddress

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]


def other_model(engine):
    engine.info = engine.info.model_copy(update={"name": "another", "fingerprint": "g"})
    return engine


async def change(r, id: str, **fields) -> dict:
    async with r.http.patch(f"{r.server.url}/admin/engines/{id}", json=fields) as reply:
        assert reply.status == 200
        return await reply.json()


# Models


async def test_an_engine_that_returns_serves_only_the_served_model(route, fake):
    a, b = fake("a"), other_model(fake("b"))
    async with route(a, health_timeout_s=0.2) as r, b.serving():
        registry = r.server.router.registry
        a.silent = True
        await until(lambda: registry["a"].status == "down")
        await r.post("/admin/engines", {"url": b.url})
        await until(lambda: any(backend.usable for backend in registry))
        assert registry.model.info.name == "another"
        a.silent = False  # the same process, so the same epoch
        await until(lambda: "another" in registry["a"].last_error)
        assert [backend.id for backend in registry if backend.usable] == ["b"]
        await r.post("/admin/engines", {"url": a.url, "heartbeat": True})
        assert not registry["a"].usable
        b.silent = True  # then the other model may be served again
        await until(lambda: registry["a"].usable)
        assert registry.model.info.name == "fake"


async def test_the_first_engine_decides_the_model_even_if_it_answers_later(route, fake):
    class Slow(fake):
        async def model(self, http):
            await asyncio.sleep(0.2)
            return await super().model(http)

    a, b = Slow("a"), other_model(fake("b"))
    async with route(a, b) as r:
        registry = r.server.router.registry
        await until(lambda: registry["a"].usable)
        assert registry.model.info.name == "fake"
        assert "another" in [*registry][1].last_error


async def test_the_error_of_a_down_engine_is_the_last_one_and_its_model_is_read_once(route, fake):
    class Counting(fake):
        models = states = 0

        async def model(self, http):
            self.models += 1
            return await super().model(http)

        async def state(self, http):
            self.states += 1
            return await super().state(http)

    b = other_model(Counting("b"))
    async with b.serving():
        port = int(b.url.rsplit(":", 1)[1])
    async with route(fake("a")) as r:
        await r.post("/admin/engines", {"url": b.url, "id": "b"})
        backend = r.server.router.registry["b"]
        await until(lambda: backend.status == "down")
        assert "another" not in backend.last_error
        async with b.serving(port):
            await until(lambda: "another" in backend.last_error)
            seen = b.states
            await until(lambda: b.states > seen + 3)
            assert b.models == 1


# Roles, labels, removal


async def test_heartbeats_undo_neither_labels_nor_roles(route, fake):
    a = fake("a")
    async with a.serving(), route() as r:
        body = {"url": a.url, "id": "a", "labels": {"zone": "1"}, "role": "any"}
        await r.post("/admin/engines", {**body, "heartbeat": True})
        backend = r.server.router.registry["a"]
        await until(lambda: backend.usable)
        assert backend.labels == {"zone": "1"}
        await change(r, "a", labels={"zone": "2"}, role="decode")
        await r.post("/admin/engines", {**body, "heartbeat": True})
        assert (backend.labels, backend.role) == ({"zone": "2"}, "decode")


async def test_a_posted_role_stays(route, fake):
    a = fake("a")
    async with a.serving(), route() as r:
        await r.post("/admin/engines", {"url": a.url, "role": "prefill"})
        backend = next(iter(r.server.router.registry))
        await until(lambda: backend.usable)
        assert backend.role == "prefill"


async def test_heartbeats_do_not_bring_back_a_removed_engine(route, fake):
    a = fake("a")
    beat = {"url": "", "id": "a", "heartbeat": True}
    async with a.serving(), route() as r:
        beat["url"] = a.url
        registry, admin = r.server.router.registry, f"{r.server.url}/admin/engines"
        for query, returns in (("", 409), ("?heartbeat=true", 200)):
            assert (await r.post("/admin/engines", {"url": a.url, "id": "a"}))[0] == 200
            await until(lambda: any(backend.usable for backend in registry))
            client = registry["a"].client
            async with r.http.delete(f"{admin}/a{query}") as reply:
                assert reply.status == 200
            assert not list(registry)
            await until(lambda http=client._http: not http._open)  # its connections are closed
            assert (await r.post("/admin/engines", beat))[0] == returns
            assert len(list(registry)) == (returns == 200)


# Health


async def test_an_unexpected_error_of_a_health_check_harms_no_other_engine(route, fake, caplog):
    a, b = fake("a"), fake("b")
    async with route(a, b) as r:
        backend = r.server.router.registry["a"]
        asked = 0

        async def fails():
            nonlocal asked
            asked += 1
            raise RuntimeError("a defect")

        works, backend.client.state = backend.client.state, fails
        await until(lambda: asked > 1)  # it is checked again
        assert backend.status == "down" and "a defect" in backend.last_error
        assert "a defect" in caplog.text
        assert (await r.post("/v1/completions", ASK))[0] == 200
        backend.client.state = works
        await until(lambda: backend.usable)


async def test_an_answer_from_before_a_loss_does_not_count(route, fake):
    class Gated(fake):
        healths = 0
        held: asyncio.Event | None = None

        async def health(self, http):
            self.healths += 1
            return await super().health(http)

        async def state(self, http):
            if self.held is not None:
                await self.held.wait()
            return await super().state(http)

    a = Gated("a")
    async with route(a, health_timeout_s=30) as r:
        backend = r.server.router.registry["a"]
        a.held, seen = asyncio.Event(), a.healths
        await until(lambda: a.healths > seen)
        asked = a.healths
        backend.go_down("as if it were dead")
        a.held.set()
        await until(lambda: backend.usable)
        assert a.healths > asked


# Secrets


def with_secret(fake, digest: str):
    class Keyed(fake):
        async def state(self, http):
            reply = await super().state(http)
            reply.text = json.dumps({**json.loads(reply.text), "secret_digest": digest})
            return reply

    return Keyed


async def test_engines_with_different_secrets_serve_without_puts(route, fake):
    p, d = (
        with_secret(fake, "1" * 16)("p", role="prefill"),
        with_secret(fake, "2" * 16)("d", role="decode"),
    )
    async with route(p, d, strategy="prefill_decode") as r:
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
        receipt = await r.receipt("x")
        assert receipt["fallbacks"] == ["not_sent"] and not receipt["retries"]
        assert not p.named("remote_send") and not d.leases
        errors = [e["last_error"] for e in (await r.get("/admin/engines"))["engines"]]
        assert errors[0] is None and "MICROSERVE_SECRET" in errors[1]
        status, body = await r.post("/admin/migrate", {"prefix": PROMPT, "from": "p", "to": "d"})
        assert status == 400 and "secrets" in body["error"]["message"]


async def test_an_address_that_is_refused_for_unknown_reasons_is_not_fatal(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    p.refuse["remote_send"] = [BadAddress("not signed with this cluster's secret")]
    async with route(p, d, strategy="prefill_decode") as r:
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
        receipt = await r.receipt("x")
        assert receipt["fallbacks"] == ["not_sent"]
        assert receipt["legs"][1]["error"]["type"] == "bad_address"
    assert not d.leases


@pytest.mark.slow
@pytest.mark.processes
def test_a_drain_between_engines_with_different_secrets_computes_again():
    engines = [EngineProcess("--engine-id", f"e{n}", secret=f"secret {n}") for n in range(2)]
    router = RouterProcess([engine.url for engine in engines], "data_parallel")
    try:
        listed = until_process(lambda: router.http.get("/admin/engines").json()["engines"])
        assert "MICROSERVE_SECRET" in listed[1]["last_error"] and listed[1]["status"] == "up"
        body = {
            "prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True,
        }  # fmt: skip
        tokens: list[int] = []
        with router.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                event = line.removeprefix("data: ")
                if event in ("", "[DONE]"):
                    continue
                fields = json.loads(event)
                assert "error" not in fields, fields
                first = not tokens
                tokens += [t for choice in fields["choices"] for t in choice["token_ids"]]
                if first:
                    busy = next(
                        e["id"]
                        for e in router.http.get("/admin/engines").json()["engines"]
                        if e["load"]["streams"]
                    )
                    router.http.patch(f"/admin/engines/{busy}", json={"draining": True})
        assert tokens == router.tokens(PROMPT, 100)
        receipt = router.http.get(f"/admin/requests/{reply.headers['X-Request-Id']}").json()
        assert [retry["error"]["type"] for retry in receipt["retries"]] == ["draining"]
        assert "not_sent" in receipt["fallbacks"]
    finally:
        router.kill()
        for engine in engines:
            engine.kill()
