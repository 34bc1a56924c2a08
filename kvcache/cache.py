"""The unified KV cache interface (the microserving paper, §3.4 and Table 2).

Two stages. *Declare*: `add_sequence`, `fork_sequence`, `remove_sequence`, `pop`, `grow`,
`prep_recv`, `mark_send`, `commit`, `begin_forward`. *Compute*: `attention`, once per layer, which
appends, puts what was marked, and attends; then `end_forward`. The model knows only `attention`.

Threads. Metadata is guarded by `lock`. Page contents are not: a page is written by the forward pass
for the sequence that owns it, or by a peer under a lease, and read by whoever holds it. `attention`
runs without the lock, so leases come and go while a step is computed; sequences in a forward pass
must not be removed until `end_forward`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcache.address import KVAddress, page_runs, prompt_digest
from kvcache.attention import BLOCK
from kvcache.errors import (
    BadAddress,
    BadRange,
    BadRequest,
    Internal,
    KVIncomplete,
    NoCapacity,
    StaleEpoch,
)
from kvcache.eviction import EvictionPolicy
from kvcache.layout import KVLayout
from kvcache.lease import LeaseTable, ReceiveLease
from kvcache.pool import SCRATCH_PAGE, PagePool
from kvcache.prefix import PrefixCache
from kvcache.step import Mark, PagedSequence, Step
from kvcache.transport import Put, Transport
from kvcache.types import EngineId, LeaseId, PageId, SeqId

__all__ = ["KVCache", "PageUse"]

STALL_S = 1.0  # a gap between sweeps beyond which the time did not count for any sender


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages by owner, adding up to `total`; `pinned` ones are cached or active as well."""

    total: int
    free: int
    cached: int
    leased: int
    active: int
    quarantined: int
    pinned: int


class KVCache:
    """One engine's pool, its sequences, its prefix cache and its receive leases."""

    def __init__(
        self,
        layout: KVLayout,
        transport: Transport,
        *,
        query_heads: int,
        engine_id: EngineId,
        epoch: int,
        secret: bytes,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret` signs addresses; `fingerprint` says whose KV may be put here (`KVLayout`).

        Raises `BadRequest` for a page size that does not divide the attention block.
        """
        if BLOCK % layout.page_size:
            raise BadRequest(f"page size {layout.page_size} does not divide {BLOCK}")
        self.layout = layout
        self.transport = transport
        self.lock = threading.RLock()
        self.fingerprint = fingerprint
        self.pool = transport.region.pool
        self._group = query_heads // layout.kv_heads
        self._engine_id = engine_id
        self._epoch = epoch
        self._secret = secret
        self._clock = clock
        self._pages = PagePool(layout.pages)
        self._policy = EvictionPolicy(layout.pages)
        self._prefix = PrefixCache(self._pages, layout.page_size, self._policy)
        self._leases = LeaseTable(transport.region)
        self._sequences: dict[SeqId, PagedSequence] = {}
        self._step: Step | None = None
        self._swept = clock()

    # Declare: sequences

    def add_sequence(self, seq_id: SeqId, tokens: Sequence[int] = ()) -> int:
        """A new sequence with the longest cached prefix of `tokens`; returns its length."""
        with self.lock:
            self._check_new(seq_id)
            pages = self._prefix.match(tokens)
            length = len(pages) * self.layout.page_size
            self._sequences[seq_id] = PagedSequence(self._shared(pages), length)
            return length

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """A new sequence with the first `length` tokens of `parent`.

        Full pages are shared, a partial last one is copied. Raises `BadRange`, `NoCapacity`.
        """
        with self.lock:
            self._check_new(child)
            source = self._sequence(parent)
            if not 0 <= length <= source.length:
                raise BadRange(f"cannot fork at {length} of {source.length} tokens")
            full, rest = divmod(length, self.layout.page_size)
            tail = self._take(1) if rest else []
            if tail:
                old = source.pages[full]
                self.pool[:, tail[0], :, :rest] = self.pool[:, old, :, :rest]
            pages = self._shared(source.pages[:full]) + tail
            self._sequences[child] = PagedSequence(pages, length)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Let go of a sequence's pages, to be reused at once: its put, if any, must be closed."""
        with self.lock:
            self._pages.drop(self._sequence(seq_id).pages)
            del self._sequences[seq_id]

    def pop(self, seq_id: SeqId, count: int) -> None:
        """Forget the last `count` tokens of a sequence, and the pages that this leaves empty."""
        with self.lock:
            sequence = self._sequence(seq_id)
            if not 0 <= count <= sequence.length:
                raise BadRange(f"cannot pop {count} of {sequence.length} tokens")
            length = sequence.length - count
            keep = self.layout.pages_for(length)
            shared = (
                length % self.layout.page_size and self._pages.refs[sequence.pages[keep - 1]] > 1
            )
            if shared:
                # The partial page will be written again; others see it full.
                raise BadRange("cannot pop into a page that is shared")
            self._pages.drop(sequence.pages[keep:])
            del sequence.pages[keep:]
            sequence.length = length

    def grow(self, seq_id: SeqId, length: int) -> None:
        """Make room for `length` tokens. Raises `NoCapacity`, changing nothing."""
        with self.lock:
            sequence = self._sequence(seq_id)
            missing = self.layout.pages_for(length) - len(sequence.pages)
            if missing > 0:
                sequence.pages += self._take(missing)

    def length(self, seq_id: SeqId) -> int:
        """Tokens whose KV the sequence has."""
        with self.lock:
            return self._sequence(seq_id).length

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """Let the prefix cache share the sequence's full pages; `tokens` are the sequence's own."""
        with self.lock:
            sequence = self._sequence(seq_id)
            full = min(len(tokens), sequence.length) // self.layout.page_size
            self._prefix.insert(tokens[: full * self.layout.page_size], sequence.pages[:full])

    def pin(self, tokens: Sequence[int]) -> int:
        """Keep what is cached of a prefix; returns its tokens. Raises `NoCapacity`."""
        with self.lock:
            return self._prefix.pin(tokens)

    def unpin(self, tokens: Sequence[int]) -> int:
        """Keep a prefix no longer; returns the tokens that were kept for it. Idempotent."""
        with self.lock:
            return self._prefix.unpin(tokens)

    # Declare: receiving

    def prep_recv(
        self, request_id: str, prompt: Sequence[int], end: int, reserve: int, lease_s: float
    ) -> tuple[ReceiveLease, str]:
        """Match `prompt[:end]` here and take pages for the rest; returns the lease and its address.

        Raises `BadRequest` if this can never fit, `NoCapacity` if it does not now. Leases and their
        reserves get at most half of the pool, and leave every running sequence a page to grow into,
        so that two engines which wait for each other's room always have some.
        """
        tokens = list(prompt[:end])
        with self.lock:
            matched = self._prefix.match(tokens)
            begin = len(matched) * self.layout.page_size
            wanted = self.layout.pages_for(end + reserve) - len(matched)
            limit = self._pages.total // 2
            if wanted > limit:
                raise BadRequest(
                    f"{end} tokens and a reserve of {reserve} take {wanted} pages; "
                    f"a lease may take {limit}",
                    param="end",
                )
            held = self._leases.leased + self._leases.quarantined
            if held + wanted > limit:
                raise NoCapacity(f"{wanted} pages wanted; leases hold {held} of at most {limit}")
            matched = self._shared(matched)
            try:
                # After sharing, so that taking pages cannot evict what was matched.
                if self.available < wanted + len(self._sequences):
                    raise NoCapacity(f"{wanted} pages wanted, {self.available} available")
                own = self._take(wanted)
                try:
                    lease = self._leases.open(
                        request_id, tokens, matched, begin, own, lease_s, self._clock()
                    )
                except NoCapacity:
                    self._pages.drop(own)
                    raise
            except NoCapacity:
                self._pages.drop(matched)
                raise
            address = KVAddress(
                engine_id=self._engine_id,
                epoch=self._epoch,
                endpoint=self.transport.endpoint,
                lease_id=lease.lease_id,
                slot=lease.slot,
                nonce=lease.nonce,
                begin=begin,
                end=end,
                runs=page_runs(own[: self.layout.pages_for(end) - len(matched)]),
                fingerprint=self.fingerprint,
                digest=prompt_digest(tokens),
            )
            return lease, address.sign(self._secret)

    def lease(self, lease_id: LeaseId) -> ReceiveLease:
        """A live lease as it stands. Raises `LeaseExpired`, `UnknownLease`."""
        with self.lock:
            return self._leases.get(lease_id)

    def start_lease(
        self,
        lease_id: LeaseId,
        seq_id: SeqId,
        tokens: Sequence[int],
        begin: int | None,
        *,
        fence: bool = False,
    ) -> int:
        """Turn a lease into a sequence of its first `begin` tokens (default: what has landed).

        Returns the length: at least what was matched, since those pages are shared, and less than
        all of `tokens`, since the last one has to be computed for its logits. The pages, with the
        reserve, are the sequence's from now on. Raises `LeaseExpired`, `UnknownLease`,
        `BadRange`, `BadRequest` (another prompt), and `KVIncomplete` (less has landed than `begin`,
        or a sender is still writing); the lease lives on after these.

        With `fence`, a sender that is still writing, as one that was stopped, is left behind: the
        page with the watermark is copied, fresh pages follow it (`NoCapacity` if there are none),
        and the old ones are quarantined. Full pages below the watermark are never written again.
        """
        with self.lock:
            self._check_new(seq_id)
            lease = self._leases.get(lease_id)
            if list(tokens[: lease.end]) != lease.tokens:
                raise BadRequest("the lease is for another prompt", param="lease_id")
            length = lease.landed if begin is None else begin
            if not 0 <= length <= lease.end:
                raise BadRange(f"begin {length} is outside [0, {lease.end}]", param="begin")
            if length > lease.landed:
                raise KVIncomplete(f"begin is {length}, but {lease.landed} tokens have landed")
            own = self._fenced(lease) if fence else self._leases.take_over(lease)
            matched = lease.matched
            length = max(length, lease.begin)
            if lease.begin < len(tokens):
                length = min(length, len(tokens) - 1)
            else:
                # All is matched, and its last page, which others share, must not be written.
                matched, shared = matched[:-1], matched[-1:]
                self._pages.drop(shared)
                length = len(matched) * self.layout.page_size
            self._sequences[seq_id] = PagedSequence(matched + own, length)
            return length

    def commit(self, lease_id: LeaseId) -> int:
        """Publish the full pages of a lease to the prefix cache and end it.

        Returns the tokens published, matched ones included. Raises `LeaseExpired`, `UnknownLease`,
        and `KVIncomplete` where not all has landed; the lease lives on then.
        """
        with self.lock:
            lease = self._leases.get(lease_id)
            if lease.landed < lease.end:
                raise KVIncomplete(f"{lease.landed} of {lease.end} tokens have landed")
            self._leases.take_over(lease)
            pages = lease.matched + lease.own
            full = lease.landed // self.layout.page_size
            tokens = full * self.layout.page_size
            self._prefix.insert(lease.tokens[:tokens], pages[:full])
            self._pages.drop(pages)
            return tokens

    def release(self, lease_id: LeaseId) -> None:
        """End a lease and discard what has landed. Raises `LeaseExpired`, `UnknownLease`."""
        with self.lock:
            self._end(self._leases.get(lease_id))

    def sweep(self) -> list[ReceiveLease]:
        """End the leases whose time is up, and free pages that have come out of quarantine.

        Call it often; a long gap (this process was stopped) counts for no sender.
        """
        with self.lock:
            now = self._clock()
            gap, self._swept = now - self._swept, now
            if gap > STALL_S:
                for lease in self._leases.live():
                    lease.deadline += gap
            late = self._leases.expired(now)
            for lease in late:
                self._end(lease)
            self._pages.drop(self._leases.sweep())
            return late

    # Declare: sending

    def open_put(self, kv_addr: str, prompt: Sequence[int], begin: int, end: int) -> Put:
        """Check an address and claim its lease, before a byte is written. May wait for the peer's
        write right: call it without the lock.

        Raises `BadAddress` (forged, malformed, another layout or weights, another prompt),
        `BadRange`, `LeaseExpired`, `StaleEpoch`, `PeerUnreachable`, `Timeout`.
        """
        address = KVAddress.verify(kv_addr, self._secret)
        if address.fingerprint != self.fingerprint:
            raise BadAddress("kv_addr is for another layout or other weights", param="kv_addr")
        if not address.begin <= begin < end <= address.end:
            raise BadRange(
                f"[{begin}, {end}) is not in the lease's [{address.begin}, {address.end})",
                param="begin",
            )
        if address.end > len(prompt) or prompt_digest(prompt[: address.end]) != address.digest:
            raise BadAddress("kv_addr is for another prompt", param="prompt")
        if address.engine_id == self._engine_id and address.epoch != self._epoch:
            raise StaleEpoch("this engine was restarted since the address was made")
        return self.transport.open(address, begin)

    def mark_send(self, seq_id: SeqId, put: Put, begin: int, end: int) -> None:
        """Send positions `[begin, end)` of a sequence: what is here now, page to page; the rest as
        `attention` computes it, layer by layer."""
        with self.lock:
            sequence = self._sequence(seq_id)
            sequence.mark = Mark(put, begin, end)
            here = min(sequence.length, end)
            if begin < here:
                put.write(range(self.layout.layers), sequence.pages, begin, here)
                put.signal(here)

    def clear_mark(self, seq_id: SeqId) -> None:
        """Send nothing further of a sequence."""
        with self.lock:
            self._sequence(seq_id).mark = None

    # Compute

    def begin_forward(self, seq_ids: Sequence[SeqId], lengths: Sequence[int]) -> None:
        """Declare a step: `lengths[i]` further tokens of sequence `seq_ids[i]`, row after row.

        Room must have been made with `grow`. Plans the metadata once for all layers.
        """
        with self.lock:
            self._step = Step(
                [self._sequence(seq_id) for seq_id in seq_ids],
                lengths,
                page_size=self.layout.page_size,
                group=self._group,
                device=self.pool.device,
            )

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Append, put what is marked, attend.

        `q` is `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`, after RoPE;
        rows past the declared ones are padding, and zero in the result, which is shaped as `q`.
        """
        step = self._step
        if step is None:
            raise Internal("attention without begin_forward")
        pages = self.pool[layer]
        step.append(pages, k, v)
        step.put(layer)
        return step.attend(pages, q)

    def end_forward(self) -> None:
        """The step's tokens count as present, and are signalled where they were put."""
        with self.lock:
            if self._step is None:
                raise Internal("end_forward without begin_forward")
            step, self._step = self._step, None
            step.finish()

    def abort_forward(self) -> None:
        """Forget a step that failed; its tokens are not present."""
        with self.lock:
            self._step = None

    # Show

    @property
    def available(self) -> int:
        """Pages that are free or can be made so by eviction."""
        with self.lock:
            return self._pages.free + self._prefix.evictable

    @property
    def prefix_tokens(self) -> int:
        """Tokens in the prefix cache."""
        with self.lock:
            return self._prefix.tokens

    def leases(self) -> list[ReceiveLease]:
        """The live leases."""
        with self.lock:
            return self._leases.live()

    def page_use(self) -> PageUse:
        """Pages by owner."""
        with self.lock:
            free, cached = self._pages.free, self._prefix.cached
            leased, quarantined = self._leases.leased, self._leases.quarantined
            rest = self._pages.total - free - cached - leased - quarantined
            return PageUse(
                self._pages.total, free, cached, leased, rest, quarantined, self._policy.pinned
            )

    def check_integrity(self) -> None:
        """Prove that every page is free or held by whom the books say. Raises `Internal`."""
        with self.lock:
            self._pages.check(self._holders())
            if bool(self.pool[:, SCRATCH_PAGE].count_nonzero()):
                raise Internal("the scratch page has been written")

    def _holders(self) -> Iterator[Sequence[PageId]]:
        for sequence in self._sequences.values():
            if sequence.length > len(sequence.pages) * self.layout.page_size:
                raise Internal("a sequence is longer than its pages")
            yield sequence.pages
        yield from self._prefix.holders()
        yield from self._leases.holders()

    def _sequence(self, seq_id: SeqId) -> PagedSequence:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise Internal(f"there is no sequence {seq_id}") from None

    def _check_new(self, seq_id: SeqId) -> None:
        if seq_id in self._sequences:
            raise Internal(f"sequence {seq_id} exists")

    def _shared(self, pages: Sequence[PageId]) -> list[PageId]:
        self._pages.share(pages)
        return list(pages)

    def _take(self, count: int) -> list[PageId]:
        missing = count - self._pages.free
        if missing > 0:
            self._prefix.evict(missing)
        return self._pages.take(count)

    def _fenced(self, lease: ReceiveLease) -> list[PageId]:
        """Pages with what has landed of a lease, which no writer can reach; ends the lease."""
        safe, rest = divmod(lease.landed - lease.begin, self.layout.page_size)
        fresh = self._take(len(lease.own) - safe)
        if rest:
            self.pool[:, fresh[0], :, :rest] = self.pool[:, lease.own[safe], :, :rest]
        kept, lease.own = lease.own[:safe], lease.own[safe:]
        self._pages.drop(self._leases.close(lease))
        return kept + fresh

    def _end(self, lease: ReceiveLease) -> None:
        self._pages.drop(self._leases.close(lease))
        self._pages.drop(lease.matched)
