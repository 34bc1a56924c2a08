"""The unified KV cache interface (the microserving paper, §3.4 and Table 2).

Two stages. *Declare*: `add_sequence`, `fork_sequence`, `remove_sequence`, `pop`, `grow`,
`prep_recv`, `mark_send`, `commit`, `begin_forward`. *Compute*: `attention`, once per layer, which
appends, sends what was marked, and attends; then `end_forward`. The model knows only `attention`.

`KVCache` composes four parts and adds the lock: bookkeeping (who holds which page), a page store
(the pages, and the execution of steps), a transport (puts to and from peers), and tiers.

Threads. `lock` guards the metadata. It does not guard page contents: a page is written by the
forward pass of the sequence that owns it, or by a peer under a lease, and read by its holders.
`attention` runs without the lock, so leases come and go while a step is computed. Sequences in a
forward pass must not be removed until `end_forward`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import torch

from kvcache.bookkeeping import Bookkeeping, PageUse
from kvcache.errors import Internal
from kvcache.lease.address import KVAddress
from kvcache.lease.identity import Identity
from kvcache.lease.put import Put
from kvcache.lease.sender import Mirror, Sender
from kvcache.lease.table import ReceiveLease, Watch
from kvcache.page_store.base import PageStore
from kvcache.pages.prefix_tree import Namer, Tell
from kvcache.sequences.step import SendRange, StepDescription
from kvcache.tiers.hierarchy import Tiers
from kvcache.tiers.store import TierStore
from kvcache.tiers.tier import TierUse
from kvcache.transport.base import Transport
from kvcache.types import LeaseId, PageName, SeqId

__all__ = ["KVCache", "PageUse"]


class KVCache:
    """One engine's pages, its sequences, its prefix cache and its receive leases."""

    def __init__(
        self,
        store: PageStore,
        transport: Transport,
        *,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
        tier_stores: Sequence[TierStore] = (),
    ) -> None:
        """`store` is registered with `transport`; the cache closes both.

        `identity` goes into addresses of this cache, and those of peers are checked against it.
        `tier_stores` are room for pages beside the store's, fastest first: one tier each.
        """
        self.store = store
        self.layout = store.layout
        self.transport = transport
        self.identity = identity
        self.lock = threading.RLock()
        self.bookkeeping = Bookkeeping(
            self.layout.pages,
            self.layout.page_size,
            slots=store.slots,
            endpoint=lambda: transport.endpoint,
            shard=self.layout.shard,
            identity=identity,
            clock=clock,
        )
        manager, layers = self.bookkeeping.pages, self.layout.held.layers
        self._sequences = self.bookkeeping.sequences
        self._receiver = self.bookkeeping.receiver
        self.tiers = Tiers(
            tier_stores, manager, store.device_pages, self.layout.page_size, self.lock
        )
        self._sequences.swap_space = self.tiers
        self._sender = Sender(manager, self.page_size, layers, transport, identity, self.lock)
        self._step: StepDescription | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.page_size

    # Declare: sequences

    def add_sequence(self, seq_id: SeqId, tokens: Sequence[int] = ()) -> int:
        """Add a sequence with the longest cached prefix of `tokens`; return its length."""
        with self.lock:
            return self._sequences.add_sequence(seq_id, tokens)

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """Add a sequence with the first `length` tokens of `parent`.

        It shares full pages and gets a copy of a partial last one. Raises `BadRange`, `NoCapacity`.
        """
        with self._copying(child):
            self._sequences.fork_sequence(parent, child, length)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Release a sequence's pages for immediate reuse. Close its put first, if it has one."""
        with self.lock:
            send = self._sequences.sending(seq_id)
            self._sequences.remove_sequence(seq_id)
            self._forget_put(send)

    def pop(self, seq_id: SeqId, count: int) -> None:
        """Forget the last `count` tokens of a sequence, and the pages that this leaves empty."""
        with self.lock:
            self._sequences.pop(seq_id, count)

    def grow(self, seq_id: SeqId, length: int) -> None:
        """Make room for `length` tokens. Raises `NoCapacity`, changing nothing."""
        with self.lock:
            self._sequences.grow(seq_id, length)

    def length(self, seq_id: SeqId) -> int:
        """Return the number of tokens whose KV the sequence has."""
        with self.lock:
            return self._sequences[seq_id].length

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """Share the sequence's full pages through the prefix cache; `tokens` are its own."""
        with self.lock:
            self._sequences.publish(seq_id, tokens)

    def pin(self, tokens: Sequence[int]) -> int:
        """Protect what is cached of a prefix from eviction; return its tokens.

        Raises `NoCapacity` if too much would be pinned.
        """
        with self.lock:
            return self.bookkeeping.pages.prefix.pin(tokens)

    def unpin(self, tokens: Sequence[int]) -> int:
        """Stop protecting a prefix; return the tokens that were protected. Idempotent."""
        with self.lock:
            return self.bookkeeping.pages.prefix.unpin(tokens)

    def follow_prefixes(self, name: Namer, tell: Tell) -> list[PageName]:
        """Return the names of all cached pages; call `tell` for those that come and go.

        The thread that changes the cache calls `tell`, under the lock. There is one follower.
        """
        with self.lock:
            return self.bookkeeping.pages.prefix.follow(name, tell)

    # Declare: tiers

    @property
    def kept(self) -> bool:
        """Whether published pages are found again after this process has died."""
        return self.tiers.persistent

    def promote(self, tokens: Sequence[int]) -> Future[int] | None:
        """Bring back what tiers have of a prefix beyond what is cached; None: nothing, or no room.

        The result is the number of tokens that came back; they are cached from then on. Every
        running sequence keeps a page to grow into. The copy goes on if nobody waits for it.
        """
        with self.lock:
            return self.tiers.promote(tokens, leaving=len(self._sequences))

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        """Move a sequence that is in no step to a tier; its pages are released when copied.

        Once the result is there, the sequence can be swapped in. It can be removed at any moment.
        All other calls on it raise `Internal`. The result is its length: less than before where the
        tier could not be written. Raises `NoCapacity`, changing nothing, if no tier has room.
        """
        with self.lock:
            return self._sequences.swap_out(seq_id)

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        """Bring a sequence back, with room for `length` tokens; it exists when the result is there.

        The result is its length: less than before where the tier could not be read. Raises
        `NoCapacity`, changing nothing, also if running sequences would lose their room to grow, and
        `Internal` for a sequence that is not swapped out.
        """
        with self.lock:
            return self._sequences.swap_in(seq_id, length)

    # Declare: receiving

    def prep_recv(
        self, request_id: str, prompt: Sequence[int], end: int, reserve: int, lease_s: float
    ) -> tuple[ReceiveLease, str]:
        """Match `prompt[:end]` here and take pages for the rest; return the lease and its address.

        Leases and their reserves get at most half of the pages, and leave every running sequence a
        page to grow into, so that two engines never wait for each other's room. Raises `BadRequest`
        if this can never fit, `NoCapacity` if it does not fit now.
        """
        with self.lock:
            return self._receiver.prepare(request_id, prompt, end, reserve, lease_s)

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

        What has landed beyond the lease's prompt, in its reserve, is taken for the KV of `tokens`
        too: the caller vouches for it. The sequence owns the pages from now on, with the reserve.
        Return its length: at least what was matched, since those pages are shared, and less than
        all of `tokens`, since the last one has to be computed for its logits.

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
        """Send the new tokens of a sequence that the lease has room for, if there are `every` or
        more and the write before is over. The pages are held until this write is over."""
        with self.lock:
            self._sender.advance(mirror, self._sequences[seq_id], every)

    def extend_mirror(self, mirror: Mirror, kv_addr: str) -> None:
        """Go on with the same lease and more room. Waits as `open_put`: call it without the lock.

        Raises as `open_put`, and the failure of the write under way.
        """
        self._sender.extend(mirror, kv_addr)

    def close_mirror(self, mirror: Mirror) -> None:
        """Send nothing further; skip what is not written yet."""
        with self.lock:
            self._sender.close(mirror)

    def mark_send(self, seq_id: SeqId, put: Put, begin: int, end: int) -> None:
        """Send positions `[begin, end)` of a sequence: those present at once, all layers of a page
        together; the rest as `attention` computes it, layer by layer."""
        with self.lock:
            sequence = self._sequences[seq_id]
            self._forget_put(sequence.send)
            self.store.add_put(put)
            self._sequences.send(seq_id, SendRange(put.claim, begin, end))
            present = min(sequence.length, end)
            if begin < present:
                self.store.send(put.claim, sequence.table.ids, begin, present)

    def clear_mark(self, seq_id: SeqId) -> None:
        """Send nothing further of a sequence."""
        with self.lock:
            self._forget_put(self._sequences.sending(seq_id))
            self._sequences.send(seq_id, None)

    # Compute

    def begin_forward(self, seq_ids: Sequence[SeqId], lengths: Sequence[int]) -> None:
        """Declare a step: `lengths[i]` further tokens of sequence `seq_ids[i]`, row after row.

        `grow` must have made room. The step's metadata is planned once for all layers.
        """
        with self.lock:
            self._step = self._sequences.begin_step(seq_ids, lengths)
            self.store.begin(self._step)

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Append, send what is marked, attend.

        `q` is `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`, after RoPE.
        Rows past the declared ones are padding. The result has the shape of `q`.
        """
        return self.store.attention(layer, q, k, v)

    def put(self, layer: int) -> None:
        """Send what is marked, as the pages hold it: `attention` for a layer nobody computes."""
        self.store.put(layer)

    def end_forward(self) -> None:
        """Count the step's tokens as present, and signal those that were sent."""
        with self.lock:
            step, self._step = self._step, None
            if step is None:
                raise Internal("end_forward without begin_forward")
            self._sequences.finish_step(step)
            self.store.end()

    def abort_forward(self) -> None:
        """Forget a step that failed; its tokens are not present."""
        with self.lock:
            step, self._step = self._step, None
            self.store.abort()
            if step is not None:
                self._sequences.copied(step.copies)

    # Show

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
            return self.bookkeeping.page_use

    def tier_use(self) -> list[TierUse]:
        """Return the slots of each tier by owner, fastest first."""
        with self.lock:
            return self.tiers.use()

    def check_integrity(self) -> None:
        """Prove that every page, of the store and of tiers, is free or held as the metadata says.

        Raises `Internal`.
        """
        with self.lock:
            self.bookkeeping.check([*self._sender.holders(), *self.tiers.holders()])
            self.tiers.check()
            self.store.check()

    def close(self) -> None:
        """End the tiers' copies, then the transport, then the store. Call it without the lock."""
        with ExitStack() as stack:
            stack.callback(self.store.close)
            stack.callback(self.transport.close)
            stack.callback(self.tiers.close)

    @contextmanager
    def _copying(self, new: SeqId) -> Iterator[None]:
        """Hold the lock while sequence `new` is made; then execute the copies that fill its pages.

        They do not wait for the next step, because the pages may be sent or swapped before it. If
        they fail, the sequence is removed.
        """
        with self.lock:
            yield
            copies = self._sequences.take_copies()
            try:
                if copies:
                    self.store.copy(copies)
            except BaseException:
                self._sequences.remove_sequence(new)
                raise
            finally:
                self._sequences.copied(copies)

    def _forget_put(self, send: SendRange | None) -> None:
        if send is not None:
            self.store.remove_put(send.claim)
