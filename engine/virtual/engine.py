"""A virtual engine: the calls of a real one on a real scheduler and real bookkeeping.

What differs from `engine.service`: a step takes the time that a latency model gives, a put that of
the links, and the KV of a page is nothing. There are no tiers, grammars and texts of stop strings.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from itertools import count

from engine.borrowing import BorrowingSettings, HomeOrders, LentPages
from engine.execution.released_ids import ReleasedIds
from engine.execution.send_reply import reply_of
from engine.execution.step_output import StepOutput
from engine.latency import Profile
from engine.protocol import (
    BLOCK_TOKENS,
    BadRequest,
    DuplicateRequest,
    EngineConfig,
    EngineState,
    Extend,
    ExtendReply,
    Internal,
    Lease,
    LeaseExpired,
    LendAllocate,
    LendAllocateReply,
    LendCreditors,
    LendFree,
    LendFreeReply,
    LendHome,
    LendHomeReply,
    LendRenew,
    LendRenewReply,
    LendSend,
    LendSendReply,
    Limits,
    MirrorGeneration,
    NoCapacity,
    PageCounts,
    PeerUnreachable,
    Pin,
    PrefixChange,
    PrepRecv,
    PrepRecvReply,
    Release,
    RemoteSend,
    RemoteSendReply,
    StartGenerate,
    UnknownLease,
    Unsupported,
    generation_begin,
    resolve_position,
    send_range,
)
from engine.scheduling import (
    Generation,
    Scheduler,
    Send,
    ShipLimits,
    generation_of,
    queued_tokens,
    reserve_send,
)
from engine.virtual.cache import VirtualCache, VirtualSlots
from engine.virtual.compute import Compute
from engine.virtual.kind import EngineKind
from engine.virtual.kv_arrival import VirtualArrivals
from engine.virtual.loans import (
    RemoteAttention,
    VirtualBorrowing,
    VirtualFetchCost,
    VirtualLinks,
    VirtualLoanCalls,
)
from engine.virtual.mirrors import ExtendLease, VirtualMirrors
from engine.virtual.network import Link, VirtualNetwork
from engine.virtual.prefix_feed import VirtualPrefixFeed
from engine.virtual.put import Endpoint, Puts
from engine.virtual.steps import MOST_AT_ONCE, VirtualSteps
from engine.virtual.stream import VirtualStream
from engine.virtual.tokens import VOCAB
from kvcache.lease import Identity
from kvcache.types import EngineId, LeaseId, SeqId

__all__ = ["SECRET", "VirtualEngine"]

SECRET = b"virtual"
USUAL = EngineKind()
NO_EOS: frozenset[int] = frozenset()  # outputs end by their length alone


def url_of(engine_id: str) -> str:
    """Return the URL of a virtual engine, at which nothing listens."""
    return f"http://{engine_id}.virtual"


class VirtualEngine:
    """One engine on the running event loop.

    `network` and `peers` (by endpoint) are common to all engines that exchange KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        profile: Profile,
        network: VirtualNetwork,
        peers: dict[str, Endpoint],
        extend: ExtendLease,
        *,
        kind: EngineKind = USUAL,
        epoch: int = 1,
        most_at_once: int = MOST_AT_ONCE,
        creditors: VirtualLoanCalls | None = None,
        borrowing: BorrowingSettings | None = None,
    ) -> None:
        """`config` is that of a real engine: role, pool, budgets. Without `pool_pages`, the pool
        is the profile's. `extend` reaches another engine of the fleet by its URL. `epoch` is
        greater than that of an earlier engine in its place. With `config.borrow`, `creditors` are
        the engine's own calls to creditors, and `borrowing` says how eagerly it borrows.

        Raises `BadRequest` for a pool or a page size with which an engine cannot borrow.
        """
        loop = asyncio.get_running_loop()
        self.config = config
        self.profile = profile
        self.kind = kind
        self.context_length = config.max_model_len or profile.context_length
        pages = config.pool_pages or profile.pool_tokens // config.page_size
        endpoint = f"virtual:{config.engine_id}"
        fingerprint = hashlib.blake2b(
            f"{profile.model}|{config.page_size}|{kind.kv}".encode(), digest_size=16
        ).hexdigest()
        self.identity = Identity(
            EngineId(config.engine_id), epoch, SECRET, fingerprint, url_of(config.engine_id)
        )
        slots = VirtualSlots()
        self.link = Link(profile.put, config.engine_id)
        self.compute = Compute(profile.step, loop.time())
        self._endpoint = peers[endpoint] = Endpoint(
            self.link, epoch, slots, self._landed, self.compute
        )
        puts = Puts(
            network, peers, self._endpoint, layers=profile.layers,
            token_bytes=profile.kv_bytes_per_token / profile.layers,
            before_end=lambda: self.steps.cut(),
        )  # fmt: skip
        self.cache = VirtualCache(
            pages, config.page_size, slots, puts, self.identity, endpoint, loop.time,
            self._landed, lend_pages=int(config.lend_share * pages + 1e-6),
            loan_s=config.lease_ms / 1000,
        )  # fmt: skip
        self.borrowing: VirtualBorrowing | None = None
        remote = None
        if config.borrow and creditors is not None:
            links = VirtualLinks(peers)
            self.borrowing = VirtualBorrowing(
                self.identity, creditors, links, lambda: self.steps.cut(),
                page_size=config.page_size, settings=borrowing or BorrowingSettings(),
            )  # fmt: skip
            self.cache.borrow(self.borrowing, VirtualFetchCost(profile, BLOCK_TOKENS))
            self._orders = HomeOrders(self.cache, self.borrowing, lambda: False)
            remote = RemoteAttention(
                self.identity.engine_id, profile, self.cache.sequences, links, BLOCK_TOKENS
            )
        self._lending = LentPages(
            self.cache.bookkeeping, self.cache.lock, self.identity, lambda: False, [endpoint],
            self._borrowed if self.borrowing is not None else None,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.cache,
            token_budget=config.token_budget,
            max_batch=config.max_batch,
            swap=False,
            decode_slowdown=config.decode_slowdown,
            # Debtors and creditors share devices evenly; there is no other limit.
            ship=ShipLimits(config.token_budget, row_keys=1 << 60),
        )
        self.steps = VirtualSteps(
            self.cache, self.scheduler, self.compute, self._deliver,
            most_at_once=most_at_once, scatter=profile.scatter, remote=remote,
        )  # fmt: skip
        self.alive = True
        room = pages * config.page_size
        reach = self.context_length if self.borrowing is not None else None
        self._limits = Limits(VOCAB, self.context_length, room, reach=reach)
        self._mirrors = VirtualMirrors(self.cache, extend)
        self._feed = VirtualPrefixFeed(self.cache)
        self._arrivals = VirtualArrivals(self.cache, self.steps.cut)
        self._loop = loop
        self._most = config.max_batch + config.max_waiting
        self._seq_ids = (SeqId(number) for number in count(1))
        self._generations: dict[str, Generation] = {}
        self._streams: dict[Generation, VirtualStream] = {}
        self._starting: set[str] = set()
        self._sends: dict[str, Send] = {}
        self._released = ReleasedIds()

    # Calls

    def prep_recv(self, call: PrepRecv) -> PrepRecvReply:
        """See `MicroserveEngine.prep_recv`."""
        self.steps.cut()
        self._limits.check_prompt(call.prompt)
        self._released.check(call.request_id)
        end = resolve_position(call.end, len(call.prompt), "end")
        if any(lease.request_id == call.request_id for lease in self.cache.leases()):
            raise DuplicateRequest(f"{call.request_id} has a lease", param="request_id")
        lease_s = (call.lease_ms or self.config.lease_ms) / 1000
        lease, address = self.cache.prep_recv(
            call.request_id, call.prompt, end, call.reserve, lease_s
        )
        self.steps.wake()
        return PrepRecvReply.model_construct(
            lease_id=lease.lease_id, kv_addr=address, match_len=lease.begin, end=end,
            expires_ms=round(lease_s * 1000),
        )  # fmt: skip

    async def remote_send(self, call: RemoteSend) -> RemoteSendReply:
        """See `MicroserveEngine.remote_send`."""
        self.steps.cut()
        self._limits.check_prompt(call.prompt)
        self._released.check(call.request_id)
        begin, end = send_range(call)
        if call.request_id in self._sends:
            raise DuplicateRequest(f"a send of {call.request_id} is running", param="request_id")
        if len(self._sends) >= self._most:
            raise NoCapacity(f"{len(self._sends)} sends are running")
        put = self.cache.open_put(call.kv_addr, call.prompt, begin, end)
        self._limits.check_send(end)
        send = self._sends[call.request_id] = reserve_send(
            call, begin, end, put, self.cache, next(self._seq_ids), self._loop.time()
        )
        try:
            self.steps.stepper.submit(send)
            return await reply_of(send)
        except BaseException:
            self.steps.cut()
            self.steps.stepper.abort(send)
            raise
        finally:
            del self._sends[call.request_id]

    async def start_generate(self, call: StartGenerate) -> VirtualStream:
        """See `MicroserveEngine.start_generate`."""
        self._limits.check_prompt(call.prompt)
        self._limits.check_sampling(call)
        request_id = call.request_id
        self._released.check(request_id)
        if request_id in self._generations or request_id in self._starting:
            raise DuplicateRequest(f"{request_id} is running", param="request_id")
        if len(self._generations) + len(self._starting) >= self._most:
            raise NoCapacity(f"{len(self._generations)} requests are running or waiting")
        begin = generation_begin(call)
        if call.lease_id is None and self.borrowing is None:
            self.cache.check_room(call.prompt + call.output)
        generation = generation_of(call, next(self._seq_ids), NO_EOS)
        if call.mirror is not None:
            self.cache.check_address(call.mirror.kv_addr, generation.tokens)
        if call.lease_id is not None:
            self._starting.add(request_id)
            try:
                await self._arrivals.start(generation, LeaseId(call.lease_id), begin)
            finally:
                self._starting.discard(request_id)
        stream = VirtualStream(generation, call.stream_tokens, self._forget)
        if call.mirror is not None:
            generation.mirror = self._mirrors.start(generation, call.mirror)
        self._generations[request_id] = generation
        self._streams[generation] = stream
        self.steps.submit(generation)
        return stream

    def mirror(self, call: MirrorGeneration) -> None:
        """See `MicroserveEngine.mirror`."""
        self.steps.cut()
        generation = self._generations.get(call.request_id)
        if generation is None:
            raise BadRequest(f"no generation {call.request_id}", param="request_id")
        mirror = self._mirrors.start(generation, call)
        if generation.mirror is not None:
            generation.mirror.end()
        generation.mirror = mirror
        self.steps.stepper.advance_mirror(generation)

    def extend(self, call: Extend) -> ExtendReply:
        """See `MicroserveEngine.extend`."""
        self.steps.cut()
        lease, address = self.cache.extend(call.kv_addr, call.reserve)
        return ExtendReply.model_construct(kv_addr=address, room=lease.room)

    def commit(self, lease_id: str) -> int:
        """See `MicroserveEngine.commit`."""
        self.steps.cut()
        return self.cache.commit(LeaseId(lease_id))

    def pin(self, call: Pin) -> int:
        """See `MicroserveEngine.pin`."""
        self.steps.cut()
        self._limits.check_prompt(call.prompt)
        return self.cache.prefix.pin(call.prompt)

    def unpin(self, call: Pin) -> int:
        """See `MicroserveEngine.unpin`."""
        self.steps.cut()
        self._limits.check_prompt(call.prompt)
        return self.cache.prefix.unpin(call.prompt)

    def release(self, call: Release) -> None:
        """See `MicroserveEngine.release`."""
        self.steps.cut()
        ids = [LeaseId(call.lease_id)] if call.lease_id is not None else []
        if call.request_id is not None:
            self._released.add(call.request_id)
            ids += [
                lease.lease_id
                for lease in self.cache.leases()
                if lease.request_id == call.request_id
            ]
            if (generation := self._generations.get(call.request_id)) is not None:
                stream = self._streams[generation]
                stream.fail(Internal("the request was released"))
            if (send := self._sends.get(call.request_id)) is not None:
                self.steps.stepper.abort(send)
        for lease_id in ids:
            try:
                self.cache.release(lease_id)
            except (LeaseExpired, UnknownLease):
                continue
        self._landed()

    def lend(
        self, call: LendAllocate | LendFree | LendRenew
    ) -> LendAllocateReply | LendFreeReply | LendRenewReply:
        """Answer a debtor. See `LentPages`."""
        if isinstance(call, LendRenew):
            return self._lending.renew(call)
        self.steps.cut()  # pages change hands
        if isinstance(call, LendAllocate):
            return self._lending.allocate(call)
        reply = self._lending.free(call)
        self.steps.wake()
        return reply

    async def send_lent(self, call: LendSend) -> LendSendReply:
        """Put the KV of lent pages at an address of their debtor. See `engine.service.lending`."""
        pages = self._lending.check(call)
        target = self.cache.page_sends.open(call.kv_addr)
        try:
            await asyncio.wrap_future(self.cache.page_sends.send(target, pages))
        finally:
            target.abandon()
        return LendSendReply.model_construct(sent_pages=len(pages), bytes=target.bytes_sent)

    async def bring_home(self, call: LendHome) -> LendHomeReply:
        """See `POST /microserving/lend/home`."""
        if self.borrowing is None:
            raise Unsupported(f"{self.config.engine_id} does not borrow")
        self.steps.cut()
        return await self._orders.run(call)

    def set_creditors(self, call: LendCreditors) -> int:
        """See `POST /microserving/lend/creditors`."""
        if self.borrowing is None:
            raise Unsupported(f"{self.config.engine_id} does not borrow")
        return self.borrowing.set_creditors(call)

    def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        """Yield what the prefix cache holds, and then its changes, without end."""
        return self._feed.changes()

    def state(self) -> EngineState:
        """See `GET /microserving/state`."""
        self.steps.settle()
        use, leases, now = self.cache.bookkeeping.page_use, self.cache.leases(), self._loop.time()
        return EngineState(
            engine_id=self.config.engine_id, epoch=self.identity.epoch, role=self.config.role,
            model=self.profile.model, page_size=self.config.page_size,
            pages=PageCounts(
                total=use.total, free=use.free, cached=use.cached, leased=use.leased,
                active=use.active, quarantined=use.quarantined, lent=use.lent,
                pinned=use.pinned,
            ),
            running=len(self.scheduler.running),
            waiting=self.waiting,
            leases=[
                Lease(
                    lease_id=lease.lease_id, request_id=lease.request_id, state=lease.state,
                    begin=lease.begin, end=lease.end, landed=lease.landed,
                    expires_ms=max(0, round(1000 * (lease.deadline - now))),
                )
                for lease in leases
            ],
            puts_in_flight=len(self._sends), prefix_tokens=self.cache.prefix.tokens,
            secret_digest=self.identity.secret_digest, heartbeat=self._lending.heartbeat(),
            borrowing=self.borrowing.state() if self.borrowing is not None else None,
            queued_tokens=queued_tokens([*self._generations.values(), *self._sends.values()]),
            generations=len(self._generations) + len(self._starting),
        )  # fmt: skip

    @property
    def waiting(self) -> int:
        """Generations that wait: for room, for a shared prompt, or to start."""
        shared = self.steps.stepper.parallel_sampling.waiting
        return len(self.scheduler.waiting) + shared + len(self._starting)

    @property
    def busy(self) -> list[str]:
        """Descriptions of all that still runs; empty at rest."""
        self.steps.settle()
        name = self.config.engine_id
        return [
            *(f"a lease of {lease.end} tokens on {name}" for lease in self.cache.leases()),
            *(f"a generation on {name}" for _ in self._generations),
            *(f"a send from {name}" for _ in self._sends),
        ]

    def die(self) -> None:
        """Behave like a killed process: all that it held is gone, and nothing listens.

        Streams end after the tokens that have been computed by now.
        """
        self.steps.settle()
        self.alive = self._endpoint.alive = False
        self.steps.stop()
        self._mirrors.close()
        if self.borrowing is not None:
            self.borrowing.die()
        gone = PeerUnreachable(f"{self.config.engine_id} is dead")
        for stream in list(self._streams.values()):
            stream.fail(gone)
        for send in list(self._sends.values()):
            send.failure = send.failure or gone
            send.put.cancel()
            send.complete(gone)
        self._arrivals.fail(gone)
        self._feed.end()

    # What follows from steps and puts

    def _landed(self) -> None:
        self._arrivals.look()

    def _borrowed(self) -> dict[EngineId, int]:
        return self.borrowing.use().pages if self.borrowing is not None else {}

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.generation)
            if stream is not None:
                stream.put(output)
            else:  # it was given up during the step
                self.steps.forget(output.generation)

    def _forget(self, generation: Generation) -> None:
        """Drop a generation whose stream has ended, and abort it if it still runs."""
        if self._streams.pop(generation, None) is not None:
            del self._generations[generation.request_id]
            self.steps.forget(generation)
            self.steps.abort(generation)
            if generation.mirror is not None:
                generation.mirror.end()
