"""Any history of two caches that put into each other, with time that jumps: whatever happens, every
page has the owner that the books say, and every sequence has the KV of its own tokens.

The model computes KV from (layer, position, token), so a page that got into the wrong hands shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)
from kv_helpers import Clock, assert_content, compute, memory_cache, send

from kvcache.cache import KVCache
from kvcache.errors import (
    BadRange,
    BadRequest,
    KVIncomplete,
    LeaseExpired,
    MicroserveError,
    NoCapacity,
)
from kvcache.transport import MemoryNetwork, Put
from kvcache.types import LeaseId, SeqId

PAGES, LEASE_S = 16, 1.5
# Beginnings of few prompts that share their first pages, so that prefixes meet and branch.
PROMPTS = [[*range(8), *(100 * n + i for i in range(n % 2 * 4, 16))] for n in range(4)]
TOKENS = st.builds(lambda prompt, n: prompt[:n], st.sampled_from(PROMPTS), st.integers(1, 24))
SIDE = st.sampled_from([0, 1])


@dataclass(eq=False)
class Seq:
    side: int
    seq_id: SeqId
    tokens: list[int]
    live: bool = True


@dataclass(eq=False)
class Lease:
    side: int
    lease_id: LeaseId
    address: str
    prompt: list[int]
    end: int


@dataclass(eq=False)
class Sending:
    """A put under way, and the sequence that it sends."""

    side: int
    put: Put
    seq_id: SeqId
    lease: Lease
    tokens: list[int] = field(default_factory=list)
    live: bool = True


class TwoCaches(RuleBasedStateMachine):
    sequences, leases, sendings = Bundle("sequences"), Bundle("leases"), Bundle("sendings")

    def __init__(self) -> None:
        super().__init__()
        self.clock, network = Clock(), MemoryNetwork()
        self.caches: list[KVCache] = [
            memory_cache(network, PAGES, name=name, clock=self.clock) for name in "ab"
        ]
        self.ids = iter(range(1, 10**6))
        self.seqs: list[Seq] = []
        self.open: list[Sending] = []

    def _keep(self, seq: Seq) -> Seq:
        self.seqs.append(seq)
        return seq

    def _new_id(self) -> SeqId:
        return SeqId(next(self.ids))

    @rule(target=sequences, side=SIDE, tokens=TOKENS)
    def add(self, side: int, tokens: list[int]):
        cache, seq_id = self.caches[side], self._new_id()
        length = cache.add_sequence(seq_id, tokens)
        try:
            compute(cache, seq_id, tokens[length:])
        except NoCapacity:
            tokens = tokens[:length]
        return self._keep(Seq(side, seq_id, tokens))

    @rule(seq=sequences, tokens=TOKENS)
    def grow_and_compute(self, seq: Seq, tokens: list[int]):
        if not seq.live:
            return
        try:
            compute(self.caches[seq.side], seq.seq_id, tokens)
        except NoCapacity:
            return
        seq.tokens = seq.tokens + tokens

    @rule(target=sequences, seq=sequences, data=st.data())
    def fork(self, seq: Seq, data: st.DataObject):
        if not seq.live:
            return multiple()
        length, child = data.draw(st.integers(0, len(seq.tokens))), self._new_id()
        try:
            self.caches[seq.side].fork_sequence(seq.seq_id, child, length)
        except NoCapacity:
            return multiple()
        return self._keep(Seq(seq.side, child, seq.tokens[:length]))

    @rule(seq=sequences, data=st.data())
    def pop(self, seq: Seq, data: st.DataObject):
        if not seq.live:
            return
        count = data.draw(st.integers(0, len(seq.tokens)))
        try:
            self.caches[seq.side].pop(seq.seq_id, count)
        except BadRange:
            return
        seq.tokens = seq.tokens[: len(seq.tokens) - count]

    @rule(seq=sequences)
    def publish(self, seq: Seq):
        if not seq.live:
            return
        self.caches[seq.side].publish(seq.seq_id, seq.tokens)

    @rule(seq=consumes(sequences))
    def remove(self, seq: Seq):
        if not seq.live:
            return
        self.caches[seq.side].remove_sequence(seq.seq_id)
        seq.live = False
        self.seqs.remove(seq)

    @rule(target=leases, side=SIDE, prompt=TOKENS, reserve=st.integers(0, 5), data=st.data())
    def prep_recv(self, side: int, prompt: list[int], reserve: int, data: st.DataObject):
        end = data.draw(st.integers(0, len(prompt)))
        try:
            lease, address = self.caches[side].prep_recv("r", prompt, end, reserve, LEASE_S)
        except (NoCapacity, BadRequest):
            return multiple()
        return Lease(side, lease.lease_id, address, prompt, end)

    @rule(target=sendings, lease=leases, side=SIDE, data=st.data())
    def open_put(self, lease: Lease, side: int, data: st.DataObject):
        try:
            begin = self.caches[lease.side].lease(lease.lease_id).landed
        except LeaseExpired:
            begin = 0
        if begin >= lease.end:
            return multiple()
        end = data.draw(st.integers(begin + 1, lease.end))
        cache, seq_id = self.caches[side], self._new_id()
        try:
            put = cache.open_put(lease.address, lease.prompt, begin, end)
        except (LeaseExpired, BadRange):
            return multiple()
        here = cache.add_sequence(seq_id, lease.prompt[:end])
        cache.mark_send(seq_id, put, begin, end)
        put.close().exception(timeout=10)  # done by now: the same history, the same result
        sending = Sending(side, put, seq_id, lease, lease.prompt[:end])
        self.open.append(sending)
        self.seqs.append(Seq(side, seq_id, lease.prompt[:here]))
        return sending

    @rule(sending=sendings, count=st.integers(1, 6))
    def send_a_chunk(self, sending: Sending, count: int):
        if not sending.live:
            return
        cache = self.caches[sending.side]
        (seq,) = [seq for seq in self.seqs if seq.seq_id == sending.seq_id]
        chunk = sending.tokens[len(seq.tokens) : len(seq.tokens) + count]
        if not chunk:
            return
        try:
            compute(cache, sending.seq_id, chunk)
        except NoCapacity:
            return
        sending.put.close().exception(timeout=10)
        seq.tokens = seq.tokens + chunk

    @rule(sending=consumes(sendings), publish=st.booleans())
    def close_put(self, sending: Sending, publish: bool):
        if not sending.live:
            return
        self._close(sending, publish)

    def _close(self, sending: Sending, publish: bool) -> None:
        sending.live = False
        self.open.remove(sending)
        cache = self.caches[sending.side]
        cache.clear_mark(sending.seq_id)
        (seq,) = [seq for seq in self.seqs if seq.seq_id == sending.seq_id]
        error = sending.put.close().exception(timeout=10)
        assert error is None or isinstance(error, LeaseExpired)
        if publish and error is None:
            cache.publish(sending.seq_id, seq.tokens)
        cache.remove_sequence(sending.seq_id)
        self.seqs.remove(seq)

    @rule(lease=leases, side=SIDE, chunk=st.integers(1, 20))
    def send_the_rest(self, lease: Lease, side: int, chunk: int):
        try:
            begin = self.caches[lease.side].lease(lease.lease_id).landed
            if begin < lease.end:
                send(self.caches[side], lease.address, lease.prompt, begin, lease.end, chunk)
        except (LeaseExpired, NoCapacity):
            return

    @rule(target=sequences, lease=consumes(leases), data=st.data())
    def start(self, lease: Lease, data: st.DataObject):
        begin = data.draw(st.none() | st.integers(0, lease.end))
        seq_id, tokens = self._new_id(), [*lease.prompt, 1]
        try:
            length = self.caches[lease.side].start_lease(lease.lease_id, seq_id, tokens, begin)
        except (KVIncomplete, LeaseExpired):
            return multiple()
        return self._keep(Seq(lease.side, seq_id, tokens[:length]))

    @rule(lease=leases)
    def commit(self, lease: Lease):
        try:
            tokens = self.caches[lease.side].commit(lease.lease_id)
        except (KVIncomplete, LeaseExpired):
            return
        assert tokens <= lease.end

    @rule(lease=consumes(leases))
    def release(self, lease: Lease):
        try:
            self.caches[lease.side].release(lease.lease_id)
        except MicroserveError as error:
            assert isinstance(error, LeaseExpired)

    @rule(seconds=st.sampled_from([0.1, 0.9, 30.0]))
    def time_passes(self, seconds: float):
        self.clock.now += seconds
        for cache in self.caches:
            cache.sweep()

    @rule(side=SIDE)
    def evict_all(self, side: int):
        """A sequence that takes every page that is not held."""
        cache, seq_id = self.caches[side], self._new_id()
        room = cache.available * cache.layout.page_size
        cache.add_sequence(seq_id)
        cache.grow(seq_id, room)
        assert cache.available == 0
        cache.remove_sequence(seq_id)

    @invariant()
    def every_page_has_its_owner(self):
        for cache in self.caches:
            cache.check_integrity()
            use = cache.page_use()
            assert min(use.free, use.cached, use.leased, use.active, use.quarantined) >= 0

    @invariant()
    def every_sequence_has_its_own_content(self):
        for seq in self.seqs:
            assert_content(self.caches[seq.side], seq.seq_id, seq.tokens)

    def teardown(self):
        for sending in list(self.open):
            self._close(sending, publish=False)
        for seq in self.seqs:
            self.caches[seq.side].remove_sequence(seq.seq_id)
        for cache in self.caches:
            for lease in cache.leases():
                cache.release(lease.lease_id)
            cache.sweep()
            cache.check_integrity()
            use = cache.page_use()
            assert use.free + use.cached == use.total
            cache.transport.close()


TestTwoCaches = TwoCaches.TestCase
TestTwoCaches.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
