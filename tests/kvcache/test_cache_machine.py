"""A state machine of two caches that put into each other.

Time jumps, writers stop, caches restart, and tiers fail. After each step every page has the owner
that the manager names, and every sequence has the KV of its own tokens. The model computes KV from
(layer, position, token), so a page with a wrong owner is detected. `make fuzz` runs thousands of
other examples each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import torch
from gated_store import PATIENCE_S, GatedStore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from kv_helpers import (
    DIM,
    HEADS,
    KV_HEADS,
    Clock,
    assert_content,
    compute,
    kv_of,
    memory_cache,
    send,
    small_layout,
)
from tier_helpers import at_rest, quiet

from kvcache.cache import KVCache
from kvcache.errors import (
    BadRange,
    BadRequest,
    Internal,
    KVIncomplete,
    LeaseExpired,
    MicroserveError,
    NoCapacity,
    StaleEpoch,
    Timeout,
    UnknownLease,
)
from kvcache.lease.put import Put
from kvcache.lease.sender import Mirror
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import LeaseId, SeqId

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES, SLOTS, LEASE_S = 16, 10, 1.5
# Few prompts with common first pages, so that prefixes meet and branch.
PROMPTS = [[*range(8), *(100 * n + i for i in range(n % 2 * 4, 16))] for n in range(4)]
TOKENS = st.builds(lambda prompt, n: prompt[:n], st.sampled_from(PROMPTS), st.integers(1, 24))
OUTPUT = st.lists(st.integers(0, 3), min_size=1, max_size=9)
SIDE = st.sampled_from([0, 1])
FAILS_AFTER = st.sampled_from([None, None, None, 0, 1, 2])
GONE = (LeaseExpired, UnknownLease)  # the latter after a restart of its cache
LATE = -7.0  # the value that a stopped writer writes when it continues


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts: a stopped writer holds its right longer than any caller waits."""
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 0.0)


@dataclass(eq=False)
class Seq:
    cache: KVCache
    seq_id: SeqId
    tokens: list[int]
    live: bool = True
    away: bool = False  # swapped out

    @property
    def here(self) -> bool:
        return self.live and not self.away


@dataclass(eq=False)
class Lease:
    cache: KVCache
    lease_id: LeaseId
    address: str
    prompt: list[int]
    end: int
    room: int
    tokens: list[int]  # the prompt, and what was mirrored after it
    landed: int = 0  # as last seen


@dataclass(eq=False)
class Sending:
    """A put under way, and the sequence that it sends."""

    cache: KVCache
    put: Put
    seq: Seq
    lease: Lease
    tokens: list[int]
    live: bool = True


@dataclass(eq=False)
class Mirroring:
    """A mirror, and the sequence that it follows."""

    cache: KVCache
    mirror: Mirror
    seq: Seq
    lease: Lease
    live: bool = True


@dataclass(eq=False)
class Stopped:
    """A writer stopped during a copy: it has the write right, and may still write."""

    cache: KVCache
    slot: int
    places: list[tuple[int, int]] = field(default_factory=list)  # page, slot in it


class TwoCaches(RuleBasedStateMachine):
    sequences, leases, sendings = Bundle("sequences"), Bundle("leases"), Bundle("sendings")
    mirrorings, stops = Bundle("mirrorings"), Bundle("stops")

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.network = Clock(), MemoryNetwork()
        self.stores: dict[KVCache, GatedStore] = {}
        self.caches: list[KVCache] = [self._new_cache(side, epoch=1) for side in (0, 1)]
        self.dead: list[KVCache] = []
        self.ids = iter(range(1, 10**6))
        self.seqs: list[Seq] = []
        self.receiving: list[Lease] = []
        self.open: list[Sending] = []
        self.mirrors: list[Mirroring] = []
        self.stopped: list[Stopped] = []

    def _new_cache(self, side: int, epoch: int) -> KVCache:
        store = GatedStore(small_layout(1), SLOTS)
        cache = memory_cache(
            self.network, PAGES, name="ab"[side], clock=self.clock, epoch=epoch, stores=(store,)
        )
        self.stores[cache] = store
        return cache

    def _keep(self, seq: Seq) -> Seq:
        self.seqs.append(seq)
        return seq

    def _new_id(self) -> SeqId:
        return SeqId(next(self.ids))

    # Initial leases, so that few steps reach interesting states

    @initialize(target=leases, side=SIDE, prompt=TOKENS, other=TOKENS, reserve=st.integers(0, 12))
    def first_leases(self, side: int, prompt: list[int], other: list[int], reserve: int):
        """One on each side."""
        first = self._prepare(side, prompt, len(prompt), min(reserve, 32 - len(prompt)))
        second = self._prepare(1 - side, other, len(other), min(reserve, 32 - len(other)))
        return multiple(first, second)

    # Sequences

    @rule(target=sequences, side=SIDE, tokens=TOKENS)
    def add(self, side: int, tokens: list[int]):
        cache, seq_id = self.caches[side], self._new_id()
        length = cache.add_sequence(seq_id, tokens)
        try:
            compute(cache, seq_id, tokens[length:])
        except NoCapacity:
            tokens = tokens[:length]
        return self._keep(Seq(cache, seq_id, tokens))

    @rule(seq=sequences, tokens=TOKENS, fails_after=FAILS_AFTER)
    def grow_and_compute(self, seq: Seq, tokens: list[int], fails_after: int | None):
        if seq.here:
            self._step(seq, tokens, fails_after)

    @rule(target=sequences, seq=sequences, data=st.data())
    def fork(self, seq: Seq, data: st.DataObject):
        if not seq.here:
            return multiple()
        length, child = data.draw(st.integers(0, len(seq.tokens))), self._new_id()
        try:
            seq.cache.fork_sequence(seq.seq_id, child, length)
        except NoCapacity:
            return multiple()
        return self._keep(Seq(seq.cache, child, seq.tokens[:length]))

    @rule(seq=sequences, data=st.data())
    def pop(self, seq: Seq, data: st.DataObject):
        if not seq.here:
            return
        count = data.draw(st.integers(0, len(seq.tokens)))
        try:
            seq.cache.pop(seq.seq_id, count)
        except BadRange:
            return
        seq.tokens = seq.tokens[: len(seq.tokens) - count]

    @rule(seq=sequences)
    def publish(self, seq: Seq):
        if seq.here:
            seq.cache.publish(seq.seq_id, seq.tokens)

    @rule(seq=consumes(sequences))
    def remove(self, seq: Seq):
        if seq.live:
            self._remove(seq)

    def _remove(self, seq: Seq) -> None:
        seq.cache.remove_sequence(seq.seq_id)
        seq.live = False
        self.seqs.remove(seq)

    def _compute(self, seq: Seq, tokens: list[int]) -> bool:
        try:
            compute(seq.cache, seq.seq_id, tokens)
        except NoCapacity:
            return False
        seq.tokens = seq.tokens + tokens
        return True

    def _step(self, seq: Seq, tokens: list[int], fails_after: int | None) -> None:
        """Run a step that fails after `fails_after` layers, so that its tokens do not count."""
        if fails_after is None:
            self._compute(seq, tokens)
            return
        cache, start = seq.cache, len(seq.tokens)
        try:
            cache.grow(seq.seq_id, start + len(tokens))
        except NoCapacity:
            return
        cache.begin_forward([seq.seq_id], [len(tokens)])
        for layer in range(fails_after):
            kv = kv_of(tokens, layer, start) + 0.5  # differs from the final KV
            query = torch.zeros(len(tokens), HEADS, DIM)
            cache.attention(layer, query, kv[:, 0].view(-1, KV_HEADS, DIM), kv[:, 1])
        cache.abort_forward()

    # Tiers

    @rule(seq=sequences)
    def swap_out(self, seq: Seq):
        if not seq.here:
            return
        before = seq.cache.page_use()
        try:
            moved = seq.cache.swap_out(seq.seq_id)
        except NoCapacity:
            assert seq.cache.page_use() == before
            return
        seq.away = True
        for use in (seq.cache.length, lambda seq_id: seq.cache.grow(seq_id, 1)):
            with pytest.raises(Internal, match="swapped out"):
                use(seq.seq_id)
        self._moved(seq, moved)

    @rule(seq=sequences, further=st.integers(0, 8))
    def swap_in(self, seq: Seq, further: int):
        if not (seq.live and seq.away):
            return
        before = seq.cache.page_use()
        try:
            moved = seq.cache.swap_in(seq.seq_id, len(seq.tokens) + further)
        except NoCapacity:
            assert seq.cache.page_use() == before
            return
        self._moved(seq, moved)
        seq.away = False

    @rule(seq=consumes(sequences), further=st.integers(0, 8))
    def remove_while_it_moves(self, seq: Seq, further: int):
        """Remove the sequence while it is swapped out, or in if it is out."""
        if not seq.live:
            return
        with suppress(NoCapacity):
            if seq.away:
                seq.cache.swap_in(seq.seq_id, len(seq.tokens) + further)
            else:
                seq.cache.swap_out(seq.seq_id)
        self._remove(seq)

    @rule(side=SIDE, tokens=TOKENS)
    def promote(self, side: int, tokens: list[int]):
        quiet(self.caches[side])
        before = self.caches[side].prefix_tokens
        landing = self.caches[side].promote(tokens)
        if landing is not None:
            landed = landing.result(PATIENCE_S)
            assert landed <= len(tokens)
            assert self.caches[side].prefix_tokens == before + landed

    @rule(side=SIDE, after=st.integers(0, 2))
    def a_tier_will_fail(self, side: int, after: int):
        self.stores[self.caches[side]].fail_at = after

    def _moved(self, seq: Seq, moved: Future[int]) -> None:
        """Truncate the model's sequence to the tokens that a failing tier has kept."""
        length = moved.result(PATIENCE_S)
        assert length <= len(seq.tokens)
        seq.tokens = seq.tokens[:length]

    # Pins

    @rule(side=SIDE, tokens=TOKENS, keep=st.booleans())
    def pin(self, side: int, tokens: list[int], keep: bool):
        cache = self.caches[side]
        if not keep:
            cache.unpin(tokens)
            assert cache.unpin(tokens) == 0
            return
        try:
            kept = cache.pin(tokens)
        except NoCapacity:
            return
        assert kept <= len(tokens)
        assert cache.page_use().pinned <= PAGES // 2

    # Leases

    @rule(target=leases, side=SIDE, prompt=TOKENS, reserve=st.integers(0, 12), data=st.data())
    def prep_recv(self, side: int, prompt: list[int], reserve: int, data: st.DataObject):
        return self._prepare(side, prompt, data.draw(st.integers(0, len(prompt))), reserve)

    def _prepare(self, side: int, prompt: list[int], end: int, reserve: int):
        cache = self.caches[side]
        try:
            lease, address = cache.prep_recv("r", prompt, end, reserve, LEASE_S)
        except (NoCapacity, BadRequest):
            return multiple()
        made = Lease(cache, lease.lease_id, address, prompt, end, end + reserve, prompt[:end])
        self.receiving.append(made)
        return made

    @rule(lease=leases, reserve=st.integers(1, 12))
    def extend(self, lease: Lease, reserve: int):
        try:
            real, lease.address = lease.cache.extend(lease.address, reserve)
        except (NoCapacity, BadRequest, *GONE):
            return
        lease.room += reserve
        assert real.room == lease.room

    @rule(target=sequences, lease=consumes(leases), fence=st.booleans(), data=st.data())
    def start(self, lease: Lease, fence: bool, data: st.DataObject):
        return self._start(lease, fence, data)

    def _start(self, lease: Lease, fence: bool, data: st.DataObject):
        begin = data.draw(st.none() | st.integers(0, lease.room))
        heard = data.draw(st.integers(lease.end, max(len(lease.tokens), lease.end)))
        seq_id, tokens = self._new_id(), [*lease.tokens[:heard], 1]
        before = lease.cache.page_use()
        try:
            length = lease.cache.start_lease(lease.lease_id, seq_id, tokens, begin, fence=fence)
        except (KVIncomplete, NoCapacity, *GONE) as error:
            assert fence or not isinstance(error, NoCapacity)
            assert lease.cache.page_use() == before
            return multiple()
        assert length < len(tokens)
        return self._keep(Seq(lease.cache, seq_id, tokens[:length]))

    @rule(lease=leases)
    def commit(self, lease: Lease):
        try:
            tokens = lease.cache.commit(lease.lease_id)
        except (KVIncomplete, *GONE):
            return
        assert tokens <= lease.end

    @rule(lease=consumes(leases))
    def release(self, lease: Lease):
        try:
            lease.cache.release(lease.lease_id)
        except MicroserveError as error:
            assert isinstance(error, GONE)

    @rule(seconds=st.sampled_from([0.1, 0.9, 30.0]))
    def time_passes(self, seconds: float):
        self.clock.now += seconds
        for cache in self.caches:
            cache.sweep()

    # Sends

    @rule(target=sendings, lease=leases, side=SIDE, data=st.data())
    def open_put(self, lease: Lease, side: int, data: st.DataObject):
        return self._open_put(lease, side, data)

    def _open_put(self, lease: Lease, side: int, data: st.DataObject):
        begin = self._landed(lease)
        if begin >= lease.end:
            return multiple()
        end = data.draw(st.integers(begin + 1, lease.end))
        cache, seq_id = self.caches[side], self._new_id()
        with self._may_be_refused(lease) as refused:
            put = cache.open_put(lease.address, lease.prompt, begin, end)
        if refused:
            return multiple()
        here = cache.add_sequence(seq_id, lease.prompt[:end])
        cache.mark_send(seq_id, put, begin, end)
        put.close().exception(timeout=10)  # wait, so that the same history gives the same result
        seq = self._keep(Seq(cache, seq_id, lease.prompt[:here]))
        sending = Sending(cache, put, seq, lease, lease.prompt[:end])
        self.open.append(sending)
        return sending

    @rule(sending=sendings, count=st.integers(1, 6), fails_after=FAILS_AFTER)
    def send_a_chunk(self, sending: Sending, count: int, fails_after: int | None):
        self._send_a_chunk(sending, count, fails_after)

    def _send_a_chunk(self, sending: Sending, count: int, fails_after: int | None) -> None:
        chunk = sending.tokens[len(sending.seq.tokens) :][:count]
        if sending.live and chunk:
            self._step(sending.seq, chunk, fails_after)
            sending.put.close().exception(timeout=10)

    @rule(sending=sendings)
    def cancel_put(self, sending: Sending):
        """Tokens computed afterwards are not sent."""
        sending.put.cancel()

    @rule(sending=consumes(sendings), publish=st.booleans())
    def close_put(self, sending: Sending, publish: bool):
        if sending.live:
            self._close(sending, publish)

    def _close(self, sending: Sending, publish: bool) -> None:
        sending.live = False
        self.open.remove(sending)
        sending.cache.clear_mark(sending.seq.seq_id)
        error = sending.put.close().exception(timeout=10)
        assert error is None or isinstance(error, (LeaseExpired, Timeout))
        if publish and error is None:
            sending.cache.publish(sending.seq.seq_id, sending.seq.tokens)
        self._remove(sending.seq)

    @rule(lease=leases, side=SIDE, chunk=st.integers(1, 20))
    def send_the_rest(self, lease: Lease, side: int, chunk: int):
        self._send_the_rest(lease, side, chunk)

    def _send_the_rest(self, lease: Lease, side: int, chunk: int) -> None:
        begin = self._landed(lease)
        if begin < lease.end:
            with self._may_be_refused(lease):
                send(self.caches[side], lease.address, lease.prompt, begin, lease.end, chunk)

    # Mirrors

    @initialize(target=sendings, lease=leases, side=SIDE, data=st.data())
    def first_put(self, lease: Lease, side: int, data: st.DataObject):
        return self._open_put(lease, side, data)

    @initialize(target=mirrorings, lease=leases, side=SIDE)
    def first_mirror(self, lease: Lease, side: int):
        return self._open_mirror(lease, side)

    @rule(target=mirrorings, lease=leases, side=SIDE)
    def open_mirror(self, lease: Lease, side: int):
        return self._open_mirror(lease, side)

    def _open_mirror(self, lease: Lease, side: int):
        cache, seq_id = self.caches[side], self._new_id()
        with self._may_be_refused(lease) as refused:
            mirror = cache.open_mirror(lease.address, lease.tokens)
        if refused:
            return multiple()
        length = cache.add_sequence(seq_id, lease.prompt[: lease.end])
        seq = self._keep(Seq(cache, seq_id, lease.prompt[:length]))
        mirroring = Mirroring(cache, mirror, seq, lease)
        self.mirrors.append(mirroring)
        return mirroring

    @rule(mirroring=mirrorings, output=OUTPUT, every=st.integers(1, 5))
    def mirror(self, mirroring: Mirroring, output: list[int], every: int):
        """Compute the prompt if necessary, then some output; put the new tokens."""
        self._mirror(mirroring, output, every)

    def _mirror(self, mirroring: Mirroring, output: list[int], every: int) -> None:
        lease, seq = mirroring.lease, mirroring.seq
        if not mirroring.live:
            return
        if not self._compute(seq, lease.prompt[len(seq.tokens) : lease.end] + output):
            return
        mirroring.cache.mirror(seq.seq_id, mirroring.mirror, every)
        self._settle(mirroring)

    @rule(mirroring=mirrorings)
    def extend_mirror(self, mirroring: Mirroring):
        mirror = mirroring.mirror
        if not mirroring.live or mirror.extending or mirror.failure is not None:
            return
        with self._may_be_refused(mirroring.lease):
            mirroring.cache.extend_mirror(mirror, mirroring.lease.address)

    @rule(mirroring=consumes(mirrorings))
    def close_mirror(self, mirroring: Mirroring):
        if mirroring.live:
            self._close_mirror(mirroring)

    def _settle(self, mirroring: Mirroring) -> None:
        """Wait for the puts under way; record the lease's tokens beyond its prompt."""
        mirror = mirroring.mirror
        if mirror.put is not None:
            mirror.put.close().exception(timeout=10)
        assert mirror.held == []
        assert mirror.failure is None or isinstance(mirror.failure, (LeaseExpired, Timeout))
        assert mirror.landed <= mirror.room
        # The one that has landed anything beyond the prompt is the only one that ever can.
        if mirror.landed > mirroring.lease.end:
            mirroring.lease.tokens = mirroring.seq.tokens[: mirror.landed]

    def _close_mirror(self, mirroring: Mirroring) -> None:
        mirroring.live = False
        self.mirrors.remove(mirroring)
        mirroring.cache.close_mirror(mirroring.mirror)
        self._remove(mirroring.seq)

    # Histories of several steps, which are rare at random

    @rule(
        target=sequences,
        mirroring=consumes(mirrorings),
        parts=st.lists(OUTPUT, max_size=3),
        every=st.integers(1, 5),
        data=st.data(),
    )
    def mirror_and_start(
        self, mirroring: Mirroring, parts: list[list[int]], every: int, data: st.DataObject
    ):
        """Mirror part by part, then start from the replica with an output that may be shorter."""
        for output in parts:
            self._mirror(mirroring, output, every)
        return self._start(mirroring.lease, False, data)

    @rule(sending=sendings, count=st.integers(1, 6))
    def a_lease_ends_under_its_put(self, sending: Sending, count: int):
        """Its pages get another owner at once; the sender does not know and continues."""
        lease = sending.lease
        if not sending.live or lease.cache not in self.caches:
            return
        with suppress(*GONE):
            lease.cache.release(lease.lease_id)
        seq = self._keep(Seq(lease.cache, self._new_id(), []))
        lease.cache.add_sequence(seq.seq_id)
        self._compute(seq, [7] * (lease.cache.available * lease.cache.layout.page_size))
        chunk = sending.tokens[len(sending.seq.tokens) :][:count]
        if chunk:
            self._step(sending.seq, chunk, None)
        sending.put.close().exception(timeout=10)
        assert_content(seq.cache, seq.seq_id, seq.tokens)
        self._remove(seq)

    @rule(sending=sendings, side=SIDE, chunk=st.integers(1, 20), count=st.integers(1, 6))
    def another_sender_takes_over(self, sending: Sending, side: int, chunk: int, count: int):
        """The first sender does not know and continues."""
        if sending.live:
            self._send_the_rest(sending.lease, side, chunk)
            self._send_a_chunk(sending, count, None)

    # Writers that stop

    @rule(target=stops, lease=leases)
    def stop_a_writer(self, lease: Lease):
        """The writer has the write right, and its late write is beyond the watermark."""
        try:
            real = lease.cache.lease(lease.lease_id)
        except GONE:
            return multiple()
        region, size = lease.cache.transport.region, lease.cache.layout.page_size
        if not region.try_acquire_right(real.slot):
            return multiple()
        behind = range(real.landed - real.begin, real.room - real.begin)
        places = [(real.own[at // size], at % size) for at in behind]
        stopped = Stopped(lease.cache, real.slot, places)
        self.stopped.append(stopped)
        return stopped

    @rule(stopped=consumes(stops), writes=st.booleans())
    def a_writer_goes_on(self, stopped: Stopped, writes: bool):
        if stopped in self.stopped:
            self._go_on(stopped, writes)

    def _go_on(self, stopped: Stopped, writes: bool) -> None:
        self.stopped.remove(stopped)
        if writes:
            for page, slot in stopped.places:
                stopped.cache.store.pool[:, page, :, slot] = LATE
        stopped.cache.transport.region.release_right(stopped.slot)

    # Restarts of caches

    @rule(side=SIDE, lease=leases, dice=st.integers(0, 3))
    def restart(self, side: int, lease: Lease, dice: int):
        """Replace a cache by an empty one with its name and endpoint; rarely, as it ends much."""
        if dice:
            return
        old = self.caches[side]
        for stopped in [stopped for stopped in self.stopped if stopped.cache is old]:
            self._go_on(stopped, writes=False)
        for sending in [sending for sending in self.open if sending.cache is old]:
            self._close(sending, publish=False)
        for mirroring in [mirroring for mirroring in self.mirrors if mirroring.cache is old]:
            self._close_mirror(mirroring)
        for seq in [seq for seq in self.seqs if seq.cache is old]:
            seq.live = False
            self.seqs.remove(seq)
        new = self._new_cache(side, old.identity.epoch + 1)
        self.dead.append(old)
        self.caches[side] = new
        assert isinstance(old.transport, MemoryTransport)
        self.network.members[old.transport.endpoint] = new.transport  # type: ignore[assignment]
        if lease.cache is old:
            for cache in self.caches:
                with pytest.raises((StaleEpoch, BadRange)):
                    cache.open_put(lease.address, lease.prompt, 0, lease.end)
                with pytest.raises(StaleEpoch):
                    cache.open_mirror(lease.address, lease.prompt)
            with pytest.raises(StaleEpoch):
                new.extend(lease.address, 1)

    def _landed(self, lease: Lease) -> int:
        try:
            return lease.cache.lease(lease.lease_id).landed
        except GONE:
            return 0

    @contextmanager
    def _may_be_refused(self, lease: Lease) -> Iterator[list[bool]]:
        """For a reason that there is; what is yielded is true then."""
        refused: list[bool] = []
        try:
            yield refused
        except (LeaseExpired, BadRange, NoCapacity):
            refused.append(True)
        except Timeout:
            assert any(stopped.cache is lease.cache for stopped in self.stopped)
            refused.append(True)
        except StaleEpoch:
            assert lease.cache in self.dead
            refused.append(True)

    @rule(side=SIDE)
    def evict_all(self, side: int):
        """Add a sequence that takes every page that is not held."""
        cache, seq_id = self.caches[side], self._new_id()
        most = cache.available
        cache.add_sequence(seq_id)
        taken = 0
        with suppress(NoCapacity):
            for taken in range(most):
                cache.grow(seq_id, (taken + 1) * cache.layout.page_size)
            taken = most
        # `available` is what can be had at most: a cached page stays while one after it is held,
        # which happens where a sequence has computed again what another had published.
        assert taken <= most and cache.page_use().free == 0
        cache.remove_sequence(seq_id)

    @invariant()
    def every_page_has_its_owner(self):
        for cache in self.caches:
            quiet(
                cache
            )  # wait for the copying threads, so that the same history gives the same result
            cache.check_integrity()
            (tier,) = cache.tiers.use()
            assert tier.free + tier.cached + tier.swapped == tier.total == SLOTS
            away = [seq for seq in self.seqs if seq.cache is cache and seq.away]
            pages = sum(cache.layout.pages_for(len(seq.tokens)) for seq in away)
            assert tier.swapped == pages
            use = cache.page_use()
            assert min(use.free, use.cached, use.leased, use.active, use.quarantined) >= 0
            assert use.leased + use.quarantined <= use.total // 2

    @invariant()
    def every_sequence_has_its_own_content(self):
        for seq in self.seqs:
            if seq.here:
                assert_content(seq.cache, seq.seq_id, seq.tokens)

    @invariant()
    def no_watermark_falls(self):
        for lease in self.receiving:
            with suppress(*GONE):
                landed = lease.cache.lease(lease.lease_id).landed
                assert lease.landed <= landed <= lease.room
                lease.landed = landed

    def teardown(self):
        for stopped in list(self.stopped):
            self._go_on(stopped, writes=True)
        for sending in list(self.open):
            self._close(sending, publish=False)
        for mirroring in list(self.mirrors):
            self._close_mirror(mirroring)
        self.every_sequence_has_its_own_content()
        for seq in list(self.seqs):
            self._remove(seq)
        for cache in self.caches:
            for lease in cache.leases():
                cache.release(lease.lease_id)
            cache.sweep()
            at_rest(cache)
        for cache in [*self.caches, *self.dead]:
            cache.close()


TestTwoCaches = pytest.mark.slow(TwoCaches.TestCase)
TestTwoCaches.settings = settings(
    settings.default,
    max_examples=max(settings.default.max_examples, 130),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
