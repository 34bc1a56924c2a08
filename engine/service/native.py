"""This project's own engine, as the HTTP API serves it."""

from __future__ import annotations

import dataclasses
import time

from engine.protocol import (
    ALL_CAPABILITIES,
    EngineConfig,
    EngineState,
    EngineStatistics,
    EngineTimeline,
    Extend,
    ExtendReply,
    Internal,
    Lease,
    MirrorGeneration,
    ModelInfo,
    PageCounts,
    Pin,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    TierCounts,
)
from engine.service.borrowing import HomeOrders
from engine.service.engine import MicroserveEngine
from engine.service.event_mux import EventMuxes
from engine.service.generation_stream import GenerationStream
from engine.service.lending import Lending
from engine.service.metrics import EngineMetrics
from engine.service.prefix_feed import PrefixFeed

__all__ = ["NativeEngine"]

STUCK_S = 60.0  # a longer step counts as a hang


class NativeEngine:
    """A `MicroserveEngine` with its reports. Implements `engine.api.served_engine.ServedEngine`."""

    def __init__(self, engine: MicroserveEngine, config: EngineConfig, epoch: int) -> None:
        self._engine = engine
        self._config = config
        self._epoch = epoch
        self._secret_digest = engine.cache.identity.secret_digest
        self.borrowing = borrowing = engine.borrowing
        self.lending = Lending(
            engine.cache,
            lambda: engine.draining,
            engine.creditor,
            (lambda: borrowing.use().pages) if borrowing is not None else None,
        )
        self.home_orders = (
            HomeOrders(engine.cache, borrowing, lambda: engine.draining)
            if borrowing is not None
            else None
        )
        self.promote = engine.promote
        self.may_wait = engine.may_wait

    @property
    def metrics(self) -> EngineMetrics:
        return self._engine.metrics

    @property
    def muxes(self) -> EventMuxes:
        return self._engine.muxes

    @property
    def prefixes(self) -> PrefixFeed:
        return self._engine.prefixes

    async def prep_recv(self, call: PrepRecv) -> PrepRecvReply:
        return self._engine.prep_recv(call)

    async def remote_send(self, call: RemoteSend) -> RemoteSendReply:
        return await self._engine.remote_send(call)

    async def start_generate(self, call: StartGenerate) -> GenerationStream:
        return await self._engine.start_generate(call)

    async def mirror(self, call: MirrorGeneration) -> None:
        self._engine.mirror(call)

    async def extend(self, call: Extend) -> ExtendReply:
        return self._engine.extend(call)

    async def commit(self, lease_id: str) -> int:
        return self._engine.commit(lease_id)

    async def pin(self, call: Pin) -> int:
        return self._engine.pin(call)

    async def unpin(self, call: Pin) -> int:
        return self._engine.unpin(call)

    async def release(self, call: Release) -> None:
        self._engine.release(call)
        if call.request_id is not None:
            await self._engine.flush()

    def model_info(self) -> ModelInfo:
        """Describe the model, for routers."""
        engine = self._engine
        loaded, layout = engine.model, engine.cache.layout
        return ModelInfo(
            name=self._config.model,
            context_length=engine.context_length,
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=list(loaded.eos_token_ids),
            bos_token=loaded.bos_token,
            eos_token=loaded.eos_token,
            tokenizer_json=loaded.tokenizer_json,
            chat_template=loaded.chat_template,
            fingerprint=engine.cache.identity.fingerprint,
            page_size=layout.page_size,
            kv_bytes_per_token=layout.layers * layout.token_bytes,
            layers=layout.layers,
            add_bos=loaded.add_bos,
            capabilities=list(ALL_CAPABILITIES),
        )

    def state(self) -> EngineState:
        """Return pages, leases and queues as they are now."""
        engine, cache, config = self._engine, self._engine.cache, self._config
        use, now = cache.page_use(), time.monotonic()
        return EngineState(
            engine_id=config.engine_id,
            epoch=self._epoch,
            role=config.role,
            model=config.model,
            page_size=cache.layout.page_size,
            healthy=self._healthy,
            pages=PageCounts(
                total=use.total,
                free=use.free,
                cached=use.cached,
                leased=use.leased,
                active=use.active,
                quarantined=use.quarantined,
                pinned=use.pinned,
                lent=use.lent,
            ),
            running=engine.running,
            waiting=engine.waiting,
            leases=[
                Lease(
                    lease_id=lease.lease_id,
                    request_id=lease.request_id,
                    state=lease.state,
                    begin=lease.begin,
                    end=lease.end,
                    landed=lease.landed,
                    expires_ms=max(round((lease.deadline - now) * 1000), 0),
                )
                for lease in cache.leases()
            ],
            puts_in_flight=engine.puts_in_flight,
            prefix_tokens=cache.prefix_tokens,
            tiers=[TierCounts(**dataclasses.asdict(tier)) for tier in cache.tier_use()],
            draining=engine.draining,
            secret_digest=self._secret_digest,
            workers=engine.workers(),
            heartbeat=self.lending.heartbeat(),
            borrowing=self.borrowing.state() if self.borrowing is not None else None,
            lending=self.lending.state(),
            prompt_tokens=engine.loop.stats.prompt_tokens,
            generation_tokens=engine.loop.stats.generation_tokens,
            queued_tokens=engine.generations.queued_tokens + engine.sends.queued_tokens,
            generations=len(engine.generations) + len(engine.generations.starting),
        )

    def statistics(self) -> EngineStatistics:
        """Return how long this engine's own steps and puts took lately."""
        timings, config = self._engine.loop.timings, self._config
        return EngineStatistics(
            steps=[(*work, seconds) for work, seconds in timings.steps()],
            puts=[(count, seconds) for count, seconds in timings.puts()],
            token_budget=config.token_budget,
            max_batch=config.max_batch,
            max_waiting=config.max_waiting,
            decode_slowdown=config.decode_slowdown,
            lease_ms=config.lease_ms,
            row_multiple=timings.row_multiple,
        )

    def timeline(self, seconds: float) -> EngineTimeline:
        """Return the steps and puts of the latest `seconds`. May be called on any thread."""
        recent = self._engine.loop.recent
        steps = recent.steps(seconds) if seconds else []
        puts = recent.puts(seconds) if seconds else []
        return EngineTimeline.model_construct(
            now=recent.clock(),
            steps=[(*step[:4], list(step.requests)) for step in steps],
            puts=puts,
        )

    async def check_integrity(self) -> None:
        """Verify that every page has exactly the owner that the bookkeeping says."""
        self._engine.cache.check_integrity()

    def check_health(self) -> None:
        """Raise `Internal` unless the step loop makes progress."""
        if not self._healthy:
            idle_s = time.monotonic() - self._engine.loop.progress
            raise Internal(f"the step loop has made no progress for {idle_s:.0f} s")

    @property
    def _healthy(self) -> bool:
        loop = self._engine.loop
        return loop.alive and time.monotonic() - loop.progress <= STUCK_S
