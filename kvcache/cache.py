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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvcache.attention.stable import BLOCK, planner_for
from kvcache.errors import BadRequest, Internal
from kvcache.lease.address import KVAddress
from kvcache.lease.identity import Identity
from kvcache.lease.put import Put
from kvcache.lease.receiver import Receiver
from kvcache.lease.sender import Mirror, Sender
from kvcache.lease.table import ReceiveLease, Watch
from kvcache.memory.layout import KVLayout
from kvcache.pages.page_manager import PageManager
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.pages.prefix_tree import Namer, Tell
from kvcache.sequences.step import Mark, Step
from kvcache.sequences.table import SequenceTable
from kvcache.tiers.hierarchy import Tiers
from kvcache.tiers.store import Store
from kvcache.tiers.tier import TierUse
from kvcache.transport.base import Transport
from kvcache.types import LeaseId, PageName, SeqId

__all__ = ["KVCache", "PageUse"]


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
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
        stores: Sequence[Store] = (),
    ) -> None:
        """`identity` is what addresses into this cache will say, and what others are held against.
        `stores` are room for pages beside the pool, fastest first: one tier each.

        Raises `BadRequest` for a page size that does not divide the attention block.
        """
        if BLOCK % layout.page_size:
            raise BadRequest(f"page size {layout.page_size} does not divide {BLOCK}")
        self.layout = layout
        self.transport = transport
        self.lock = threading.RLock()
        self.identity = identity
        self.pool = transport.region.pool
        self._planner = planner_for(layout, query_heads // layout.kv_heads, self.pool.device)
        self._books = PageManager(layout.pages, layout.page_size)
        self.tiers = Tiers(stores, self._books, self.pool, layout.page_size, self.lock)
        self._sequences = SequenceTable(self._books, layout, self.pool, self.tiers)
        self._receiver = Receiver(
            self._books, self._sequences, layout, transport, self.identity, clock
        )
        self._sender = Sender(self._books, layout, transport, identity, self.lock)
        self._step: Step | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.page_size

    # Declare: sequences

    def add_sequence(self, seq_id: SeqId, tokens: Sequence[int] = ()) -> int:
        """A new sequence with the longest cached prefix of `tokens`; returns its length."""
        with self.lock:
            return self._sequences.add(seq_id, tokens)

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """A new sequence with the first `length` tokens of `parent`.

        Full pages are shared, a partial last one is copied. Raises `BadRange`, `NoCapacity`.
        """
        with self.lock:
            self._sequences.fork(parent, child, length)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Let go of a sequence's pages, to be reused at once: its put, if any, must be closed."""
        with self.lock:
            self._sequences.remove(seq_id)

    def pop(self, seq_id: SeqId, count: int) -> None:
        """Forget the last `count` tokens of a sequence, and the pages that this leaves empty."""
        with self.lock:
            self._sequences.pop(seq_id, count)

    def grow(self, seq_id: SeqId, length: int) -> None:
        """Make room for `length` tokens. Raises `NoCapacity`, changing nothing."""
        with self.lock:
            self._sequences.grow(seq_id, length)

    def length(self, seq_id: SeqId) -> int:
        """Tokens whose KV the sequence has."""
        with self.lock:
            return self._sequences[seq_id].length

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """Let the prefix cache share the sequence's full pages; `tokens` are the sequence's own."""
        with self.lock:
            self._sequences.publish(seq_id, tokens)

    def pin(self, tokens: Sequence[int]) -> int:
        """Keep what is cached of a prefix; returns its tokens. Raises `NoCapacity`."""
        with self.lock:
            return self._books.prefix.pin(tokens)

    def unpin(self, tokens: Sequence[int]) -> int:
        """Keep a prefix no longer; returns the tokens that were kept for it. Idempotent."""
        with self.lock:
            return self._books.prefix.unpin(tokens)

    def follow_prefixes(self, name: Namer, tell: Tell) -> list[PageName]:
        """The names of all pages in the prefix cache; `tell` is called for those that come and go.

        It is called under the lock, by whatever thread changes the cache. One follower at a time.
        """
        with self.lock:
            return self._books.prefix.follow(name, tell)

    # Declare: tiers

    @property
    def kept(self) -> bool:
        """Whether what is published is found again after this process has died."""
        return self.tiers.kept

    def promote(self, tokens: Sequence[int]) -> Future[int] | None:
        """Bring back what tiers have of a prefix beyond what is cached; None: nothing, or no room.

        The result is how many tokens came back; they are cached then, and not before. Every running
        sequence keeps a page to grow into. Nobody has to wait for it.
        """
        with self.lock:
            return self.tiers.promote(tokens, leaving=len(self._sequences))

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        """Move a sequence that is in no step to a tier; its pages go when they are copied.

        From now on it can be swapped in, once the result is there, and removed, at any moment;
        all else raises `Internal`. The result is its length: less than before where the tier could
        not be written. Raises `NoCapacity`, changing nothing, where no tier has room for it.
        """
        with self.lock:
            return self._sequences.swap_out(seq_id)

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        """Bring a sequence back, with room for `length` tokens; it exists when the result is there.

        The result is its length: less than before where the tier could not be read. Raises
        `NoCapacity`, changing nothing, also where running sequences would lose their room to grow,
        and `Internal` for a sequence that is not out.
        """
        with self.lock:
            return self._sequences.swap_in(seq_id, length)

    # Declare: receiving

    def prep_recv(
        self, request_id: str, prompt: Sequence[int], end: int, reserve: int, lease_s: float
    ) -> tuple[ReceiveLease, str]:
        """Match `prompt[:end]` here and take pages for the rest; returns the lease and its address.

        Raises `BadRequest` if this can never fit, `NoCapacity` if it does not now. Leases and their
        reserves get at most half of the pool, and leave every running sequence a page to grow into,
        so that two engines which wait for each other's room always have some.
        """
        with self.lock:
            return self._receiver.prepare(request_id, prompt, end, reserve, lease_s)

    def lease(self, lease_id: LeaseId) -> ReceiveLease:
        """A live lease as it stands. Raises `LeaseExpired`, `UnknownLease`."""
        with self.lock:
            return self._receiver.leases.get(lease_id)

    def watch(self, leases: Sequence[ReceiveLease]) -> Watch:
        """Look at the watermarks of these leases again and again, without the lock."""
        return self._receiver.leases.watch(leases)

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

        What has landed beyond the lease's prompt, in its reserve, is taken for the KV of `tokens`
        too: who gives these vouches for it. Returns the length: at least what was matched, since
        those pages are shared, and less than all of `tokens`, since the last one has to be computed
        for its logits. The pages, with the reserve, are the sequence's from now on.

        Raises `LeaseExpired`, `UnknownLease`, `BadRange` (`begin` beyond the lease's room),
        `BadRequest` (another prompt), and `KVIncomplete` (less has landed than `begin`, or a sender
        is still writing); the lease lives on after these.

        With `fence`, a sender that is still writing, as one that was stopped, is left behind: the
        page with the watermark is copied, fresh pages follow it (`NoCapacity` if there are none),
        and the old ones are quarantined. Full pages below the watermark are never written again.
        """
        with self.lock:
            return self._receiver.start(lease_id, seq_id, tokens, begin, fence=fence)

    def extend(self, kv_addr: str, reserve: int) -> tuple[ReceiveLease, str]:
        """More room in a lease of ours, for `reserve` further tokens; returns its new address.

        The old one stays good for what it covers. Raises `BadAddress`, `StaleEpoch`,
        `LeaseExpired`, and, by the rule of `prep_recv`, `BadRequest` and `NoCapacity`.
        """
        with self.lock:
            return self._receiver.extend(kv_addr, reserve)

    def commit(self, lease_id: LeaseId) -> int:
        """Publish the full pages of a lease to the prefix cache and end it. Idempotent.

        Returns the tokens published, matched ones included. Raises `LeaseExpired`, `UnknownLease`,
        and `KVIncomplete` where not all has landed; the lease lives on then.
        """
        with self.lock:
            return self._receiver.commit(lease_id)

    def release(self, lease_id: LeaseId) -> None:
        """End a lease and discard what has landed. Raises `LeaseExpired`, `UnknownLease`."""
        with self.lock:
            self._receiver.release(lease_id)

    def sweep(self) -> list[ReceiveLease]:
        """End the leases whose time is up, and free pages that have come out of quarantine.

        Call it often; a long gap (this process was stopped) counts for no sender.
        """
        with self.lock:
            return self._receiver.sweep()

    # Declare: sending

    def open_put(self, kv_addr: str, prompt: Sequence[int], begin: int, end: int) -> Put:
        """Check an address and claim its lease, before a byte is written. May wait for the peer's
        write right: call it without the lock.

        Raises `BadAddress` (forged, malformed, another layout or weights, another prompt),
        `BadRange`, `LeaseExpired`, `StaleEpoch`, `PeerUnreachable`, `Timeout`.
        """
        return self._sender.open(kv_addr, prompt, begin, end)

    def check_address(self, kv_addr: str, tokens: Sequence[int]) -> KVAddress:
        """Read an address for a prompt that `tokens` begins with. Raises `BadAddress`."""
        return self._sender.check(kv_addr, tokens)

    def open_mirror(self, kv_addr: str, tokens: Sequence[int]) -> Mirror:
        """Claim a lease from its `begin` on, for a sequence of `tokens` and what will follow them.

        Waits and raises as `open_put`.
        """
        return self._sender.mirror(kv_addr, tokens)

    def mirror(self, seq_id: SeqId, mirror: Mirror, every: int) -> None:
        """Put what is new of a sequence, as far as there is room, if it is `every` tokens or more
        and the write before it is over. Its pages stay held until this one is."""
        with self.lock:
            self._sender.advance(mirror, self._sequences[seq_id], every)

    def extend_mirror(self, mirror: Mirror, kv_addr: str) -> None:
        """Go on with the same lease and more room. Waits as `open_put`: call it without the lock.

        Raises as `open_put`, and what went wrong with the write under way.
        """
        self._sender.extend(mirror, kv_addr)

    def close_mirror(self, mirror: Mirror) -> None:
        """Put nothing further; what was not written yet is skipped."""
        with self.lock:
            self._sender.close(mirror)

    def mark_send(self, seq_id: SeqId, put: Put, begin: int, end: int) -> None:
        """Send positions `[begin, end)` of a sequence: what is here now, page to page; the rest as
        `attention` computes it, layer by layer."""
        with self.lock:
            sequence = self._sequences[seq_id]
            sequence.mark = Mark(put, begin, end)
            here = min(sequence.length, end)
            if begin < here:
                put.write(range(self.layout.held.layers), sequence.pages, begin, here)
                put.signal(here)

    def clear_mark(self, seq_id: SeqId) -> None:
        """Send nothing further of a sequence."""
        with self.lock:
            self._sequences[seq_id].mark = None

    # Compute

    def begin_forward(self, seq_ids: Sequence[SeqId], lengths: Sequence[int]) -> None:
        """Declare a step: `lengths[i]` further tokens of sequence `seq_ids[i]`, row after row.

        Room must have been made with `grow`. Plans the metadata once for all layers.
        """
        with self.lock:
            self._step = Step(
                [self._sequences[seq_id] for seq_id in seq_ids],
                lengths,
                page_size=self.layout.page_size,
                planner=self._planner,
            )

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Append, put what is marked, attend.

        `q` is `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`, after RoPE;
        rows past the declared ones are padding, in the result too, which is shaped as `q`.
        """
        step = self._step
        if step is None:
            raise Internal("attention without begin_forward")
        pages = self.pool[layer]
        step.plan.append(pages, k, v)
        step.put(layer)
        return step.plan.attend(pages, q)

    def put(self, layer: int) -> None:
        """Put what is marked, as the pages hold it: `attention` where nobody computes a layer."""
        if self._step is None:
            raise Internal("put without begin_forward")
        self._step.put(layer)

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
            return self._books.available

    @property
    def prefix_tokens(self) -> int:
        """Tokens in the prefix cache."""
        with self.lock:
            return self._books.prefix.tokens

    def leases(self) -> list[ReceiveLease]:
        """The live leases."""
        with self.lock:
            return self._receiver.leases.live()

    def page_use(self) -> PageUse:
        """Pages by owner."""
        with self.lock:
            books, leases = self._books, self._receiver.leases
            free, cached = books.pages.free, books.prefix.cached
            leased, quarantined = leases.leased, leases.quarantined
            rest = books.total - free - cached - leased - quarantined
            return PageUse(
                books.total, free, cached, leased, rest, quarantined, books.policy.pinned
            )

    def tier_use(self) -> list[TierUse]:
        """Slots of each tier by owner, fastest first."""
        with self.lock:
            return self.tiers.use()

    def check_integrity(self) -> None:
        """Prove that every page, of the pool and of tiers, is free or held by whom the books say.

        Raises `Internal`.
        """
        with self.lock:
            held = (self._sequences, self._receiver, self._sender, self.tiers)
            self._books.check([pages for by in held for pages in by.holders()])
            self.tiers.check()
            if bool(self.pool[:, SCRATCH_PAGE].count_nonzero()):
                raise Internal("the scratch page has been written")

    def close(self) -> None:
        """End the tiers' copies, then the transport. Call it without the lock."""
        self.tiers.close()
        self.transport.close()
