"""The unified KV cache interface (the microserving paper, §3.4 and Table 2).

Two stages. *Declare*: `add_sequence`, `fork_sequence`, `remove_sequence`, `pop`, `grow`,
`prep_recv`, `mark_send`, `commit`, `begin_forward`. *Compute*: `attention`, once per layer, which
appends, sends what was marked, and attends; then `end_forward`. The model knows only `attention`.

`KVCache` composes four parts and adds the lock: bookkeeping (who holds which page), a page store
(the pages, and the execution of steps), a transport (puts to and from peers), and tiers. The calls
for sequences and steps are in its base class, `PagedCache`. Those for loans are bookkeeping's own;
their caller holds the lock.

Threads. `lock` guards the metadata. It does not guard page contents: a page is written by the
forward pass of the sequence that owns it, or by a peer under a lease, and read by its holders.
`attention` runs without the lock, so leases come and go while a step is computed. Sequences in a
forward pass must not be removed until `end_forward`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from kvcache.attention import BLOCK
from kvcache.bookkeeping import LOAN_S, Bookkeeping, PageUse
from kvcache.borrowing import BlockMover, Borrowing
from kvcache.errors import Internal, NoCapacity
from kvcache.lease.address import KVAddress
from kvcache.lease.identity import Identity
from kvcache.lease.page_sends import PageSends
from kvcache.lease.put import Put
from kvcache.lease.sender import Mirror, Sender
from kvcache.lease.table import ReceiveLease, Watch
from kvcache.lending import BlockSource
from kvcache.page_store.base import PageStore
from kvcache.paged_cache import PagedCache
from kvcache.pages.prefix_tree import Namer, Tell
from kvcache.remote_attention import CreditorLimits, MeasuredFetchCost, RemoteAttention
from kvcache.tiers.hierarchy import Tiers
from kvcache.tiers.statistics import TierUse
from kvcache.tiers.store import TierStore
from kvcache.transport.base import Transport
from kvcache.types import LeaseId, PageName, SeqId

__all__ = ["KVCache", "PageUse"]


class KVCache(PagedCache):
    """One engine's pages, its sequences, its prefix cache and its receive leases."""

    def __init__(
        self,
        store: PageStore,
        transport: Transport,
        *,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
        tier_stores: Sequence[TierStore] = (),
        lend_pages: int = 0,
        loan_s: float = LOAN_S,
    ) -> None:
        """`store` is registered with `transport`; the cache closes both.

        `identity` goes into addresses of this cache, and those of peers are checked against it.
        `tier_stores` are room for pages beside the store's, fastest first: one tier each. At most
        `lend_pages` pages are lent at a time, each for `loan_s` seconds.
        """
        layout = store.layout
        self.layout = layout
        self.transport = transport
        self.identity = identity
        self._clock = clock
        self.bookkeeping = Bookkeeping(
            layout.pages,
            layout.page_size,
            slots=store.slots,
            endpoint=lambda: transport.endpoint,
            shards=store.shards,
            identity=identity,
            clock=clock,
            lend_pages=lend_pages,
            loan_s=loan_s,
        )
        super().__init__(store, self.bookkeeping.sequences)
        manager, layers = self.bookkeeping.pages, layout.held.layers
        self._receiver = self.bookkeeping.receiver
        self.tiers = Tiers(tier_stores, manager, store.device_pages, layout.page_size, self.lock)
        self._sequences.swap_space = self.tiers
        self._sender = Sender(manager, self.page_size, layers, transport, identity, self.lock)
        # Sends of lent pages. Their caller holds the lock, but for `open`.
        self.page_sends = PageSends(self._sender, manager, self.page_size, layers, self.lock)
        self.elsewhere: Borrowing | None = None

    def borrow(self, source: BlockSource, remote: RemoteAttention) -> None:
        """Let long sequences have blocks in borrowed pages, from now on.

        `source` has the pages, and `remote` ships queries to them; the caller owns both, and closes
        them after the cache. Raises `Unsupported` if the store cannot ship queries, and
        `BadRequest` for a pool of fewer than three blocks.
        """
        self.store.borrow(remote)
        mover = BlockMover(self._claim_loan, self.layout.held.layers, self.page_size)
        self.elsewhere = Borrowing(
            source,
            mover,
            self._sequences,
            self.bookkeeping.pages,
            self.bookkeeping.lender,
            self.lock,
            self.bookkeeping.landings,
            MeasuredFetchCost(remote, BLOCK),
            self._clock,
            block_tokens=BLOCK,
            limits=CreditorLimits(remote),
        )
        self.bookkeeping.spare = BLOCK // self.page_size

    # Declare: prefixes

    def pin(self, tokens: Sequence[int]) -> int:
        """Protect the cached pages of a prefix from eviction; return their tokens.

        Raises `NoCapacity` if more than half of the pages would be pinned.
        """
        with self.lock:
            return self.bookkeeping.pages.prefix.pin(tokens)

    def unpin(self, tokens: Sequence[int]) -> int:
        """Stop protecting a prefix; return the tokens that were protected. Idempotent."""
        with self.lock:
            return self.bookkeeping.pages.prefix.unpin(tokens)

    def check_room(self, tokens: Sequence[int]) -> None:
        """Raise `NoCapacity` if a sequence of `tokens` has no room beside pinned prefixes.

        Of one whose blocks can be elsewhere, two have to find room.
        """
        if self.elsewhere is not None:
            tokens = tokens[: 2 * BLOCK]
        with self.lock:
            self.bookkeeping.pages.check_room(tokens)

    def follow_prefixes(self, name: Namer, tell: Tell) -> list[PageName]:
        """Return the names of all cached pages; call `tell` for those that come and go.

        The thread that changes the cache calls `tell`, under the lock. There is one follower.
        """
        with self.lock:
            return self.bookkeeping.pages.prefix.follow(name, tell)

    # Declare: tiers

    @property
    def persistent(self) -> bool:
        """Whether the next process finds the pages that this one has published."""
        return self.tiers.persistent

    def promote(self, tokens: Sequence[int]) -> Future[int] | None:
        """Copy from a tier the pages of a prefix that continue its cached ones.

        The result is the number of tokens that were copied; they are cached from then on. Return
        None if no tier has more of the prefix, or if no page is free for it. Every running sequence
        keeps a page to grow into. The copy continues if the caller does not wait for it.
        """
        with self.lock:
            return self.tiers.promote(tokens, leaving=len(self._sequences))

    # Declare: receiving

    def prep_recv(
        self, request_id: str, prompt: Sequence[int], end: int, reserve: int, lease_s: float
    ) -> tuple[ReceiveLease, str]:
        """Match `prompt[:end]` here and take pages for the rest; return the lease and its address.

        Leases and their reserves get at most half of the pages, and leave every running sequence a
        page to grow into, so that two engines never wait for each other's room. A new lease leaves
        the pages of `reserve` too. Raises `BadRequest` if this can never fit, `NoCapacity` if it
        does not fit now; loans are called back if they are in the way.
        """
        with self.lock:
            try:
                return self._receiver.prepare(request_id, prompt, end, reserve, lease_s)
            except NoCapacity:
                if self._sequences.lacking(end + reserve) > 0:
                    self._sequences.call_back(end + reserve)
                raise

    def lease(self, lease_id: LeaseId) -> ReceiveLease:
        """Return a live lease, its watermark reread. Raises `LeaseExpired`, `UnknownLease`."""
        with self.lock:
            return self._receiver.leases.get(lease_id)

    def watch(self, leases: Sequence[ReceiveLease]) -> Watch:
        """Return a reader of these leases' watermarks, which needs no lock."""
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

        KV that has landed in the reserve, beyond the lease's prompt, counts as the KV of `tokens`
        too; the caller guarantees that it is. The sequence takes over the pages, with the reserve.
        Return its length: at least the matched tokens, whose pages are shared, and less than the
        length of `tokens`, because the last one must be computed for its logits.

        Raises `LeaseExpired`, `UnknownLease`, `BadRange` (`begin` beyond the lease's room),
        `BadRequest` (another prompt), and `KVIncomplete` (less has landed than `begin`, or a sender
        is still writing); the lease lives on after these.

        With `fence`, a sender that is still writing, such as a stopped one, is left behind: the
        page with the watermark is copied, fresh pages follow it (`NoCapacity` if there are none),
        and the old ones are quarantined. Full pages below the watermark are never written again.
        """
        with self._copying(seq_id):
            return self._receiver.start(lease_id, seq_id, tokens, begin, fence=fence)

    def extend(self, kv_addr: str, reserve: int) -> tuple[ReceiveLease, str]:
        """Add room for `reserve` tokens to a lease of ours; return its new address.

        The old address stays good for what it covers. Raises `BadAddress`, `StaleEpoch`,
        `LeaseExpired`, and, by the rule of `prep_recv`, `BadRequest` and `NoCapacity`.
        """
        with self.lock:
            return self._receiver.extend(kv_addr, reserve)

    def commit(self, lease_id: LeaseId) -> int:
        """Publish the full pages of a lease to the prefix cache and end it. Idempotent.

        Return the tokens published, matched ones included. Raises `LeaseExpired`, `UnknownLease`,
        and `KVIncomplete` if not all has landed; the lease lives on then.
        """
        with self.lock:
            return self._receiver.commit(lease_id)

    def release(self, lease_id: LeaseId) -> None:
        """End a lease and discard its KV. Raises `LeaseExpired`, `UnknownLease`."""
        with self.lock:
            self._receiver.release(lease_id)

    def sweep(self) -> list[ReceiveLease]:
        """End leases and loans past their deadline; free pages that have left quarantine.

        Return the leases.

        Call it often. A long gap means that this process was stopped; it extends the deadlines.
        """
        with self.lock:
            self._release_copied()
            self.bookkeeping.lender.sweep()
            return self._receiver.sweep()

    # Declare: sending

    def open_put(self, kv_addr: str, prompt: Sequence[int], begin: int, end: int) -> Put:
        """Check an address and claim its lease, before a byte is written.

        May wait for the peer's write right: call it without the lock. Raises `BadAddress` (forged,
        malformed, another layout or weights, another prompt), `BadRange`, `LeaseExpired`,
        `StaleEpoch`, `PeerUnreachable`, `Timeout`.
        """
        return self._sender.open(kv_addr, prompt, begin, end)

    def check_address(self, kv_addr: str, tokens: Sequence[int]) -> KVAddress:
        """Read an address for a prompt that `tokens` begins with. Raises `BadAddress`."""
        return self._sender.check(kv_addr, tokens)

    def open_mirror(self, kv_addr: str, tokens: Sequence[int]) -> Mirror:
        """Claim a lease from its `begin` on, for a sequence that starts with `tokens`.

        Waits and raises as `open_put`.
        """
        return self._sender.mirror(kv_addr, tokens)

    def mirror(self, seq_id: SeqId, mirror: Mirror, every: int) -> None:
        """Send the new tokens of a sequence that the lease has room for.

        Does nothing for fewer than `every` tokens, or while the previous write is in flight. The
        pages are held until the write has ended.
        """
        with self.lock:
            self._sender.advance(mirror, self._sequences[seq_id], every)

    def extend_mirror(self, mirror: Mirror, kv_addr: str) -> None:
        """Go on with the same lease and more room. Waits as `open_put`: call it without the lock.

        Raises as `open_put`, and the failure of the write under way.
        """
        self._sender.extend(mirror, kv_addr)

    def close_mirror(self, mirror: Mirror) -> None:
        """Send nothing further; skip queued writes."""
        with self.lock:
            self._sender.close(mirror)

    # Show

    @property
    def total_pages(self) -> int:
        """All pages but the scratch page."""
        return self.layout.pages - 1

    @property
    def available(self) -> int:
        """Pages that are free or can be made so by eviction."""
        with self.lock:
            return self.bookkeeping.pages.available

    @property
    def prefix_tokens(self) -> int:
        """Tokens in the prefix cache."""
        with self.lock:
            return self.bookkeeping.pages.prefix.tokens

    def leases(self) -> list[ReceiveLease]:
        """Return the live leases."""
        with self.lock:
            return self._receiver.leases.live()

    def page_use(self) -> PageUse:
        """Return the pages by owner."""
        with self.lock:
            self._release_copied()
            return self.bookkeeping.page_use

    def tier_use(self) -> list[TierUse]:
        """Return the slots of each tier by owner, fastest first."""
        with self.lock:
            return self.tiers.use()

    def check_integrity(self) -> None:
        """Check that the metadata accounts for every page of the store and of the tiers.

        Raises `Internal` if it does not.
        """
        with self.lock:
            moving = self.elsewhere.holders() if self.elsewhere is not None else ()
            sent = (*self._sender.holders(), *self.page_sends.holders())
            self.bookkeeping.check([*sent, *self.tiers.holders(), *moving])
            if self.elsewhere is not None:
                self.elsewhere.check()
            self.tiers.check()
            self.store.check()

    def close(self) -> None:
        """End the tiers' copies, then the transport, then the store. Call it without the lock."""
        with ExitStack() as stack:
            stack.callback(self.store.close)
            stack.callback(self.transport.close)
            stack.callback(self.tiers.close)
            if self.elsewhere is not None:
                stack.callback(self.elsewhere.close)

    def _claim_loan(self, kv_addr: str) -> Put:
        """Claim a loan's pages from position 0 on. Waits and raises as `open_put`."""
        put = self._sender.mirror(kv_addr, ()).put
        if put is None:
            raise Internal("a mirror was opened without a put")
        return put
