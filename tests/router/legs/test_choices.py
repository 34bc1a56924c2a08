"""How the choices of a prompt fork from the first, with scripted engines."""

from __future__ import annotations

from engine.protocol import Internal, NoCapacity
from router.base.request import Chunk
from router.strategy.definition import strategy

ASK = {"prompt": [1, 2, 3], "max_tokens": 4, "n": 3, "seed": 1}
TEXT = "w103 w104 w105 w106 "


def by_choice(*engines) -> dict[int, list[tuple[str, dict]]]:
    """Return each choice's `start_generate` calls, with the engine that received them."""
    calls: dict[int, list[tuple[str, dict]]] = {}
    for engine in engines:
        for body in engine.named("start_generate"):
            calls.setdefault(body.get("choice", 0), []).append((engine.name, body))
    return calls


async def test_other_choices_fork_on_the_first_ones_engine(route, fake):
    a, b = fake("a"), fake("b")
    async with route(a, b) as r:
        status, body = await r.post("/v1/completions", ASK)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT] * 3
    calls = by_choice(a, b)
    ((engine, first),) = calls[0]
    assert first["forks"] == 2 and "fork_of" not in first
    for choice in (1, 2):
        ((where, other),) = calls[choice]
        assert (where, other["fork_of"], other["begin"]) == (engine, first["request_id"], 2)
        assert other["request_id"] != first["request_id"]
        assert "forks" not in other


async def test_one_choice_announces_no_forks(route, fake):
    a = fake("a")
    async with route(a) as r:
        await r.post("/v1/completions", {**ASK, "n": 1})
        await r.post("/v1/completions", {**ASK, "n": 1, "prompt": [[1], [2]]})
    assert not any({"forks", "fork_of"} & body.keys() for body in a.named("start_generate"))


async def test_each_prompt_has_its_own_first_choice(route, fake):
    a = fake("a")
    async with route(a) as r:
        await r.post("/v1/completions", {**ASK, "prompt": [[1], [2, 3]], "n": 2})
    calls = by_choice(a)
    firsts = {body["request_id"]: body["prompt"] for _, body in calls[0]}
    assert len(firsts) == 2
    assert all(firsts[body["fork_of"]] == body["prompt"] for _, body in calls[1])


async def test_other_choices_wait_while_the_first_waits_for_room(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full", retry_after_s=0.01)] * 3})
    async with route(a) as r:
        status, body = await r.post("/v1/completions", ASK)
        await r.settled()
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT] * 3
    calls = by_choice(a)
    assert [len(calls[choice]) for choice in range(3)] == [4, 1, 1]
    accepted = calls[0][-1][1]["request_id"]
    assert {calls[choice][0][1]["fork_of"] for choice in (1, 2)} == {accepted}


async def test_a_broken_fork_is_resumed_by_the_strategy(route, fake):
    never = 9  # more events than a choice has
    failures = [(never, Internal("")), (1, Internal("broken")), (never, Internal(""))]
    a, b = fake("a", error_after=failures), fake("b")
    async with route(a, b) as r:
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        (retry,) = (await r.receipt("x"))["retries"]
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT] * 3
    calls = by_choice(a, b)
    first, again = calls[retry["choice"]]
    assert (first[0], again[0]) == ("a", "b")
    assert "fork_of" in first[1] and "fork_of" not in again[1]
    assert again[1]["output"] == [103]


async def test_a_broken_first_choice_announces_no_forks_again(route, fake):
    a, b = fake("a", break_after=[1, 9, 9]), fake("b")
    async with route(a, b) as r:
        status, body = await r.post("/v1/completions", ASK)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT] * 3
    (_, first), (_, again) = by_choice(a, b)[0]
    assert first["forks"] == 2 and "forks" not in again


@strategy
async def never(request, cluster):
    """Never starts a generation."""
    if request.sampling.choice:
        yield Chunk(token_ids=[1], text="mine", finish_reason="length")
    else:
        yield Chunk(token_ids=[0], text="first", finish_reason="length")


async def test_a_strategy_without_generations_delays_no_choice(route, fake):
    a = fake("a")
    async with route(a) as r:
        r.use(never)
        status, body = await r.post("/v1/completions", ASK)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["first", "mine", "mine"]
    assert not a.named("start_generate")


async def test_a_failed_first_choice_ends_all(route, fake):
    refusals = {"start_generate": [Internal("broken")] * 3}
    a = fake("a", refuse=refusals)
    async with route(a, attempts=1) as r:
        status, body = await r.post("/v1/completions", ASK)
        await r.settled()
    assert (status, body["error"]["message"]) == (500, "broken")
    assert len(a.named("start_generate")) == 1
