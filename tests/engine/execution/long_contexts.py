"""Engines whose sequences outgrow them: one debtor and its creditors, in this process.

Pools are shared memory, puts are real puts, and queries go to real `Creditor` servers. The source
of blocks allocates straight from the creditors' bookkeeping.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import torch
from engine_helpers import generation, tiny, tiny_layout

from engine.execution.forward.model_runner import ModelRunner
from engine.execution.step_output import StepOutput
from engine.execution.stepper import Stepper
from engine.sampling.sampled import Sampled
from engine.sampling.sampler import sample
from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from kvcache.attention import BLOCK
from kvcache.cache import KVCache
from kvcache.errors import PeerUnreachable
from kvcache.lease import Identity, KVAddress
from kvcache.lending import BorrowedBlock
from kvcache.page_store import TorchPageStore
from kvcache.remote_attention import (
    AttentionShape,
    Creditor,
    Limits,
    PagesOfLoans,
    RemoteAttention,
)
from kvcache.transport import ShmTransport
from kvcache.types import EngineId, LeaseId, PageId

PAGE = 16
PER_BLOCK = BLOCK // PAGE
EPOCH = 5


def make_cache(name: str, pages: int, lend_pages: int = 0) -> KVCache:
    transport, layout = ShmTransport(EPOCH, prefault_bytes=0), tiny_layout(pages)
    return KVCache(
        TorchPageStore.on(transport, layout, query_heads=tiny().config.num_heads),
        transport,
        identity=Identity(EngineId(name), EPOCH, b"secret", "tiny"),
        lend_pages=lend_pages,
        loan_s=600.0,
    )


class Lending:
    """A creditor: its cache, and the server that answers over the pages that it has lent."""

    def __init__(
        self,
        name: str,
        pages: int = 0,
        cache: KVCache | None = None,
        limits: Limits | None = None,
    ) -> None:
        """By default, a cache that lends all of its `pages`."""
        self.name = EngineId(name)
        self.cache = cache or make_cache(name, pages, lend_pages=pages)
        assert isinstance(self.cache.store, TorchPageStore)
        self.server = Creditor(
            self.cache.store.pool,
            self.cache.layout,
            query_heads=tiny().config.num_heads,
            identity=self.cache.identity,
            bad_loans=PagesOfLoans(self.cache.bookkeeping.lender, self.cache.lock),
            share=1.0,
            limits=limits,
        )

    @property
    def lent(self) -> int:
        with self.cache.lock:
            return self.cache.bookkeeping.lender.lent

    def close(self) -> None:
        self.server.close()
        self.cache.close()


class Source:
    """A `BlockSource` that lends from creditors in this process.

    They are asked in turn, or in the order of `choices`, numbers modulo that of creditors, again
    and again. Each loan has `loan_blocks` blocks. At most `most` blocks are lent in all.
    """

    def __init__(
        self,
        debtor: EngineId,
        lending: Sequence[Lending],
        *,
        loan_blocks: int = 1,
        choices: Sequence[int] = (),
    ) -> None:
        self.on_ready: Callable[[], object] = lambda: None
        self.on_lost: Callable[[EngineId, Sequence[LeaseId]], object] = lambda *_: None
        self.on_called_back: Callable[[EngineId, Sequence[LeaseId]], object] = lambda *_: None
        self.debtor = debtor
        self.connected: Callable[[], Sequence[EngineId]] = lambda: list(self.lending)
        self.lending = {one.name: one for one in lending}
        self.dead: set[EngineId] = set()
        self.greedy: set[EngineId] = set()  # creditors that lend nothing further
        self.silent = False  # nobody lends anything
        self.most = 1 << 30
        self.wanted = 0
        self.failures: list[EngineId] = []
        self.loan_blocks = loan_blocks
        self.choices = choices
        self.lenders: set[EngineId] = set()  # that have lent
        self.free: list[tuple[EngineId, LeaseId, tuple[PageId, ...]]] = []
        self.taken: set[tuple[EngineId, LeaseId, tuple[PageId, ...]]] = set()
        self.addresses: dict[tuple[EngineId, LeaseId], str] = {}
        self.sends = 0  # blocks that were asked home
        self.refuse_sends = False
        self.hold_sends: threading.Event | None = None  # which sends wait for
        self._threads = ThreadPoolExecutor(4)
        self._numbers = count(1)
        self._turn = 0

    def want(self, blocks: int) -> None:
        self.wanted = blocks
        self.fill()

    def fill(self) -> None:
        came = False
        names = list(self.lending)
        choices = self.choices or range(len(names))
        refused = 0
        while len(self.free) < self.wanted and refused < len(names) and not self.silent:
            name = names[choices[self._turn % len(choices)] % len(names)]
            self._turn += 1
            if self.most <= len(self.free) + len(self.taken) or not self._borrow(name):
                refused += 1
            else:
                came, refused = True, 0
        while len(self.free) > self.wanted:
            self._return(self.free.pop())
        if came:
            self.on_ready()

    def take(self) -> BorrowedBlock | None:
        for block in self.free:
            name, loan, pages = block
            if name not in self.dead:
                self.free.remove(block)
                self.taken.add(block)
                self.wanted = max(self.wanted - 1, 0)
                address = self.addresses[name, loan]
                first = KVAddress.verify(address, b"secret").pages().index(pages[0])
                return BorrowedBlock(name, EPOCH, loan, address, first, pages)
        return None

    def give_back(self, block: BorrowedBlock, *, at_once: bool = False) -> None:
        known = block.creditor, block.loan, block.pages
        self.taken.remove(known)  # each once
        self._return(known)

    def send_home(
        self, block: BorrowedBlock, kv_addr: str, done: Callable[[BaseException | None], object]
    ) -> None:
        """Have the creditor send the block, on another thread."""
        self.sends += 1
        if self.refuse_sends:
            done(PeerUnreachable("the creditor refuses"))
        else:
            self._threads.submit(self._send, block, kv_addr, done)

    def _send(
        self, block: BorrowedBlock, kv_addr: str, done: Callable[[BaseException | None], object]
    ) -> None:
        cache, failure = self.lending[block.creditor].cache, None
        try:
            if self.hold_sends is not None:
                self.hold_sends.wait()
            target = cache.page_sends.open(kv_addr)
            with cache.lock:
                try:
                    cache.bookkeeping.lender.check_pages(
                        self.debtor, EPOCH, block.loan, block.pages, at=EPOCH
                    )
                    sent = cache.page_sends.send(target, block.pages)
                except BaseException:
                    target.abandon()
                    raise
            sent.result(20)
        except Exception as error:  # noqa: BLE001  told
            failure = error
        done(failure)

    def close(self) -> None:
        if self.hold_sends is not None:
            self.hold_sends.set()
        self._threads.shutdown()

    def failed(self, creditor: EngineId) -> None:
        self.failures.append(creditor)
        if creditor not in self.connected():
            self.dead.add(creditor)
            self.free = [each for each in self.free if each[0] != creditor]
            self.fill()

    def loans_of(self, name: EngineId) -> list[LeaseId]:
        return sorted({loan for own, loan, _ in [*self.taken, *self.free] if own == name})

    def call_back(self, name: EngineId, loans: Sequence[LeaseId]) -> None:
        """Call back loans of a creditor, as it tells its debtor."""
        self.free = [each for each in self.free if each[0] != name or not self._drop(each, loans)]
        self.on_called_back(name, loans)

    def lose(self, name: EngineId, loans: Sequence[LeaseId], *, tell: bool = True) -> None:
        """End loans of a creditor, which has the pages back at once. The debtor may not know."""
        lender = self.lending[name]
        with lender.cache.lock:
            for loan in loans:
                lender.cache.bookkeeping.take_back(self.debtor, EPOCH, loan, at=EPOCH)
                self.addresses.pop((name, loan), None)
        self.free = [each for each in self.free if each[0] != name or each[1] not in loans]
        if tell:
            self.on_lost(name, loans)

    def _drop(
        self, block: tuple[EngineId, LeaseId, tuple[PageId, ...]], loans: Sequence[LeaseId]
    ) -> bool:
        if block[1] in loans:
            self._return(block)
            return True
        return False

    def _borrow(self, name: EngineId) -> bool:
        if name in self.dead | self.greedy:
            return False
        loan, size = LeaseId(f"loan-{next(self._numbers)}"), self.loan_blocks * PER_BLOCK
        cache = self.lending[name].cache
        with cache.lock:
            address = cache.bookkeeping.lend(self.debtor, EPOCH, loan, size, at=EPOCH)
        if address is False:
            return False
        self.addresses[name, loan] = address
        self.lenders.add(name)
        pages = KVAddress.verify(address, b"secret").pages()
        for at in range(0, size, PER_BLOCK):
            self.free.append((name, loan, tuple(pages[at : at + PER_BLOCK])))
        return True

    def _return(self, block: tuple[EngineId, LeaseId, tuple[PageId, ...]]) -> None:
        name, loan, pages = block
        if (name, loan) not in self.addresses or name in self.dead:
            return
        cache = self.lending[name].cache
        with cache.lock:
            _, rest = cache.bookkeeping.take_back(self.debtor, EPOCH, loan, pages, at=EPOCH)
        if rest is None:
            del self.addresses[name, loan]
        else:
            self.addresses[name, loan] = rest


class Engine:
    """A cache, a stepper and the model; notes the logits of each token that it samples."""

    def __init__(
        self,
        pages: int,
        budget: int = 128,
        name: str = "debtor",
        batch: int = 16,
        lend_pages: int = 0,
    ) -> None:
        self.cache = make_cache(name, pages, lend_pages)
        self.scheduler = Scheduler(self.cache, token_budget=budget, max_batch=batch)
        self.stepper = Stepper(
            self.cache,
            self.scheduler,
            ModelRunner(tiny(), self.cache),
            self._sample,
            lambda outputs: self.outputs.extend(outputs),
            time.monotonic,
        )
        self.outputs: list[StepOutput] = []
        self.logits: dict[Generation, list[torch.Tensor]] = {}
        self.between: Callable[[int], object] = lambda step: None
        self.idle: Callable[[], object] = lambda: None

    def _sample(self, logits: torch.Tensor, jobs: Sequence[Generation]) -> list[Sampled]:
        for row, job in zip(logits, jobs, strict=True):
            self.logits.setdefault(job, []).append(row.clone())
        return sample(logits, jobs)

    def run(
        self,
        jobs: Sequence[Generation],
        *,
        aborted: Collection[Generation] = (),
        limit_s: float = 60.0,
    ) -> None:
        """Submit these jobs, and `finish` them."""
        for job in jobs:
            self.stepper.submit(job)
        self.finish(jobs, aborted=aborted, limit_s=limit_s)

    def finish(
        self,
        jobs: Sequence[Generation],
        *,
        aborted: Collection[Generation] = (),
        limit_s: float = 60.0,
    ) -> None:
        """Step until these jobs, and what is added to the list, have ended or are in `aborted`.

        `between` is called after each step that computes, and `idle` after any other.
        """
        ended: set[Generation] = set()
        until = time.monotonic() + limit_s
        seen = steps = 0
        left = list(jobs)
        while left and time.monotonic() < until:
            result = self.stepper.step()
            for output in self.outputs[seen:]:
                if output.finish is not None or output.failure is not None:
                    ended.add(output.generation)
            seen = len(self.outputs)
            if result.chunks:
                steps += 1
                self.between(steps)
            else:
                self.idle()
                time.sleep(0.0005)
            left = [job for job in jobs if job not in ended and job not in aborted]
        assert not left, f"{len(left)} jobs have not ended"

    def settle(self, limit_s: float = 10.0) -> None:
        """Step until nothing is on its way any more."""
        until = time.monotonic() + limit_s
        elsewhere = self.cache.elsewhere

        def on_its_way() -> bool:
            fetched = list(self.cache.bookkeeping.landings.holders())
            return elsewhere is not None and bool(list(elsewhere.holders()) or fetched)

        while on_its_way() and time.monotonic() < until:
            self.stepper.step()
            time.sleep(0.0005)
        self.stepper.step()

    def tokens(self, job: Generation) -> list[int]:
        """Return what was delivered of a job."""
        return [
            output.sampled.token
            for output in self.outputs
            if output.generation is job and output.sampled is not None
        ]

    def failures(self) -> list[Exception]:
        return [output.failure for output in self.outputs if output.failure is not None]


class World:
    """A debtor of `pages` pages that borrows from `creditors` engines."""

    def __init__(
        self,
        pages: int,
        creditors: int,
        lent_pages: int,
        *,
        budget: int = 128,
        loan_blocks: int = 1,
        choices: Sequence[int] = (),
        limits: Limits | None = None,
    ) -> None:
        self.engine = Engine(pages, budget)
        self.lending = [
            Lending(f"creditor-{n}", lent_pages, limits=limits) for n in range(creditors)
        ]
        shape = AttentionShape.of(self.engine.cache.layout, tiny().config.num_heads)
        self.remote = RemoteAttention(self.engine.cache.identity, shape, timeout_s=20.0)
        for one in self.lending:
            self.remote.connect(one.name, one.server.endpoints, EPOCH)
        self.source = Source(
            self.engine.cache.identity.engine_id,
            self.lending,
            loan_blocks=loan_blocks,
            choices=choices,
        )
        self.source.connected = self.remote.connected
        self.engine.cache.borrow(self.source, self.remote)

    def check(self) -> None:
        """Check that everything has been given back, and that all pages are accounted for."""
        self.engine.settle()
        self.engine.cache.check_integrity()
        use = self.engine.cache.page_use()
        assert use.free + use.cached == use.total
        assert not self.source.taken
        for one in self.lending:
            one.cache.check_integrity()
            if one.name not in self.source.dead:
                assert one.lent == 0

    def close(self) -> None:
        self.source.close()
        self.engine.cache.close()
        self.remote.close()
        for one in self.lending:
            one.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


class Outcome(NamedTuple):
    """What a generation has got: its prompt and output, and the logits of each output token."""

    tokens: list[int]
    logits: list[torch.Tensor]


def of_one_engine(jobs: Sequence[Generation]) -> list[Outcome]:
    """Return what these jobs get on one engine with room for all."""
    whole = Engine(1200, 256, "whole")
    try:
        copies = [
            generation(n, job.tokens[: job.prompt_len], max_tokens=job.sampling.max_tokens)
            for n, job in enumerate(jobs, 1)
        ]
        whole.run(copies)
        assert all(whole.tokens(copy) == list(copy.output) for copy in copies)
        return [Outcome(copy.tokens, whole.logits[copy]) for copy in copies]
    finally:
        whole.cache.close()


def check_outcomes(engine: Engine, jobs: Sequence[Generation], expected: Sequence[Outcome]) -> None:
    """Check that these jobs have got these tokens, and logits of the same bits."""
    for job, outcome in zip(jobs, expected, strict=True):
        assert engine.tokens(job) == outcome.tokens[job.prompt_len :]
        assert job.tokens == outcome.tokens
        for found, logits in zip(engine.logits[job], outcome.logits, strict=True):
            assert torch.equal(found.view(torch.int32), logits.view(torch.int32))


def check_as_one_engine(engine: Engine, jobs: Sequence[Generation]) -> None:
    """Check that these jobs have got the tokens and the logits of one engine with room for all."""
    check_outcomes(engine, jobs, of_one_engine(jobs))
