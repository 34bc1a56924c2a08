"""Virtual engines for tests, and calls to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from engine.latency import FittedLatency, Profile, PutLatency
from engine.protocol import (
    Creditor,
    Extend,
    LendCreditors,
    LendSend,
    PeerUnreachable,
    PrepRecv,
    RemoteSend,
    StartGenerate,
)
from engine.protocol.config import EngineConfig
from engine.virtual import (
    Endpoint,
    VirtualEngine,
    VirtualEvent,
    VirtualLoanCalls,
    VirtualNetwork,
    VirtualStream,
)

LAYERS, TOKEN_BYTES = 4, 400
STEP = FittedLatency(
    prefill=(10.0, 0.1, 1e-5), decode=(8.0, 0.001, 0.5), large_decode=(8.0, 0.001, 0.5)
)
PROFILE = Profile(
    name="test", model="test", device="none", gpus=0, source="made up", layers=LAYERS,
    kv_bytes_per_token=TOKEN_BYTES, context_length=4096, pool_tokens=1 << 15, step=STEP,
    put=PutLatency(bandwidth=1e6, layer_s=1e-3),
)  # fmt: skip


class Engines:
    """Engines that reach each other."""

    def __init__(self, *names: str, **options: Any) -> None:
        """`options` are those of `VirtualEngine` and of its configuration, `scatter`, and `calls`.

        `calls` makes the calls of a debtor to its creditors, as `VirtualLoanCalls` does.
        """
        calls = options.pop("calls", VirtualLoanCalls)
        profile = replace(PROFILE, scatter=options.pop("scatter", ()))
        network, peers = VirtualNetwork(), dict[str, Endpoint]()
        most = {"most_at_once": options.pop("most_at_once")} if "most_at_once" in options else {}
        self.all = {
            name: VirtualEngine(
                EngineConfig(engine_id=name, **{"decode_slowdown": 0.0, **options}),
                profile, network, peers, self._extend,
                creditors=calls(self._lend, lambda url: self._at(url).alive), **most,
            )
            for name in names
        }  # fmt: skip

    def __getitem__(self, name: str) -> VirtualEngine:
        return self.all[name]

    def _at(self, url: str) -> VirtualEngine:
        return self.all[url.removeprefix("http://").removesuffix(".virtual")]

    async def _lend(self, url: str, call: Any) -> Any:
        await asyncio.sleep(0.001)
        engine = self._at(url)
        if not engine.alive:
            raise PeerUnreachable(f"nobody listens at {url}")
        return await engine.send_lent(call) if isinstance(call, LendSend) else engine.lend(call)

    def introduce(self, debtor: str, *creditors: str) -> None:
        """Tell a debtor whom to ask, as a router does."""
        self[debtor].set_creditors(
            LendCreditors(
                creditors=[
                    Creditor(instance=name, epoch=1, url=self[name].identity.url, available=1)
                    for name in creditors
                ]
            )
        )

    async def _extend(self, url: str, call: Extend) -> str:
        await asyncio.sleep(0.001)
        return self._at(url).extend(call).kv_addr

    async def rest(self) -> None:
        """Check that nothing is left and that every page is accounted for."""
        await asyncio.sleep(1)
        for engine in self.all.values():
            if engine.alive:
                assert engine.busy == []
                use = engine.cache.bookkeeping.page_use
                assert use.active == use.leased == use.quarantined == 0
                engine.cache.check_integrity()


def generate(request_id: str, prompt: list[int], tokens: int, **fields: Any) -> StartGenerate:
    return StartGenerate(request_id=request_id, prompt=prompt, max_tokens=tokens, **fields)


def receive(request_id: str, prompt: list[int], end: int, **fields: Any) -> PrepRecv:
    return PrepRecv(request_id=request_id, prompt=prompt, end=end, **fields)


def send(request_id: str, prompt: list[int], begin: int, end: int, kv_addr: str) -> RemoteSend:
    return RemoteSend(request_id=request_id, prompt=prompt, begin=begin, end=end, kv_addr=kv_addr)


async def events(stream: VirtualStream) -> list[VirtualEvent]:
    """Read a stream to its end."""
    read = [await stream.next()]
    while read[-1].finish_reason is None:
        read.append(await stream.next())
    return read


async def tokens_of(stream: VirtualStream) -> list[int]:
    return [token for event in await events(stream) for token in event.token_ids]
