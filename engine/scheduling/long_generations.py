"""Generations that outgrow the pool: their oldest blocks go to borrowed pages of other engines.

Such a generation takes pages for its next chunk only. While it holds more than its share of the
pool, or finds no room, its oldest full blocks are moved away, and their pages are free once they
have arrived. Blocks are wanted for all of its prompt from the start, so that chunks are computed
while blocks travel.

Blocks that are called back come home, and others make room for them at other creditors. Where the
pool has room for all blocks that a generation has at a creditor, beyond what the running ones will
need, they come home if that is cheaper than to ship its queries for the rest of it. What came to
stay is let go again only when others lack pages, and nothing is fetched for a second after a block
has left: so blocks do not go back and forth.

It waits for blocks rather than take pages from others. After a second without any progress it
preempts those behind it; if it is the first of all, it fails after ten (`Scheduler.stuck`). A
generation before it preempts it as any other, if its blocks cannot be moved.

Generations that fit the pool one by one may outgrow it together. Blocks are wanted as soon as not
every running generation can get another page, which is at least a page of tokens before one lacks
it. As soon as a block has come, the oldest block of the first of them goes there: that one is
preempted last, so what has moved is seldom computed again. It counts as long from then on, so that
its blocks come home and creditors are asked for what they answer. But it has no share of the pool,
leaves nothing to newcomers and waits only while blocks are on their way: without a borrowed block
the last one is preempted at once, as on an engine that does not borrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from engine.scheduling.chunk import Chunk
from engine.scheduling.jobs import Generation, Job
from kvcache.sequences import BlocksElsewhere, SequenceCache

__all__ = ["LongGenerations", "ShipLimits"]

IMPATIENT: Final = 20  # sweeps without progress, after which those behind are preempted
QUIET: Final = 20  # sweeps in which no block has left, before any is fetched because it is cheaper
FREE_SHARE: Final = 8  # a long generation that is alone leaves one such part of the pool free
LIKELY: Final = 32  # further tokens of a generation, at least: as many as so far, unless limited


class ShipLimits(NamedTuple):
    """What a creditor computes of a step, at most.

    By default half of the limits of a `kvcache.remote_attention.Creditor`: decodes come on top.
    """

    rows: int = 512
    row_keys: int = 1 << 23  # rows, times the tokens that they attend to


USUAL: Final = ShipLimits()


class LongGenerations:
    """The long generations among the running ones. Used by the step loop's thread only."""

    def __init__(
        self, cache: SequenceCache, wake: Callable[[], object], limits: ShipLimits = USUAL
    ) -> None:
        """`wake` is called on any thread when a long generation may find room."""
        self._cache = cache
        self._wake = wake
        self._limits = limits
        self._waited: dict[Generation, int] = {}  # sweeps without progress, of each long one
        self._no_room: set[Generation] = set()  # in the latest plan
        self._waiting = False  # whether one found no room in the plan before
        self._granted: dict[Generation, int] = {}  # tokens of each in the plan under way
        self._pressed = 0  # pages that others have lacked in the latest plan
        self._pressing = 0  # likewise, in the plan under way
        self._others = 0  # running ones that are not `patient`: each needs a page to grow into
        self._relieved: set[Generation] = set()  # long ones that began as others
        self._unmet = 0  # pages that running ones lacked in the plan under way, without any block
        self._left: dict[Generation, int] = {}  # of the blocks that came to stay, let go since
        self._plans = 0
        self._turns: dict[Job, int] = {}  # the latest plan that each long generation was in
        self._quiet = QUIET  # sweeps in which no block has left

    def __contains__(self, job: Job) -> bool:
        return job in self._waited

    def outgrows(self, job: Generation) -> bool:
        """Whether a generation will never fit the pool, and may have blocks elsewhere."""
        elsewhere = self._cache.elsewhere
        return elsewhere is not None and self._pages(job.target + 1) > elsewhere.total_pages

    def patient(self, job: Job) -> bool:
        """Whether a long generation waits for blocks, rather than preempt others.

        One that fits the pool and is long only because others lacked pages does not.
        """
        if not isinstance(job, Generation) or job not in self._waited:
            return False
        return job not in self._relieved or self.outgrows(job)

    @property
    def waits(self) -> bool:
        """Whether a long generation has found no room."""
        return bool(self._no_room)

    def begin_plan(self, running: Sequence[Generation]) -> None:
        """Let go of the blocks that have arrived."""
        elsewhere = self._cache.elsewhere
        if elsewhere is None:
            return
        elsewhere.wake = self._wake
        if elsewhere.settle():
            self._waited = dict.fromkeys(self._waited, 0)
        if self._pressing or elsewhere.lacking:
            self._left = {job: elsewhere.came_to_stay(job.seq_id) for job in self._waited}
            self._quiet = 0
        for job in self._waited if elsewhere.lacking else ():
            self._move(elsewhere, job, elsewhere.lacking)
        self._waiting = bool(self._no_room)
        self._no_room.clear()
        self._granted.clear()
        self._pressed, self._pressing = self._pressing, 0
        self._unmet = 0
        self._others = sum(not self.patient(job) for job in running)

    def end_plan(
        self, head: Generation | None, running: Sequence[Generation], *, waiting: bool
    ) -> None:
        """Ask for the blocks that are needed next, and fetch those that are cheaper here.

        `head` is the first that finds no room to start. `waiting`: others wait behind it, or for a
        place in the batch.
        """
        elsewhere = self._cache.elsewhere
        if elsewhere is None:
            return
        wanted = sum(self._lacks(elsewhere, job) for job in self._waited)
        if head is not None and self.outgrows(head):
            wanted += self._blocks_for(elsewhere, head)
        lacking = self._lacking(elsewhere, running)
        wanted += self._relief(elsewhere, running, lacking)
        elsewhere.want(wanted)
        if lacking > 0:
            self._relieve(elsewhere, running)
        if self._waited and not waiting and self._quiet >= QUIET:
            self._fetch(elsewhere, running)

    def begin(self, job: Generation, *, alone: bool) -> bool:
        """Create the sequence of a generation, with room for a first chunk.

        Returns False if there is no room. It begins anyway if it is `alone`: then it waits for
        blocks. No other one begins while one waits for blocks.
        """
        elsewhere = self._cache.elsewhere
        if elsewhere is None or self._waiting:
            return False
        with self._cache.lock:
            cached = self._cache.add_sequence(job.seq_id, job.tokens[:-1])
            end = min(job.target, cached + elsewhere.block_tokens)
            if not elsewhere.grow_some(job.seq_id, end, self._others) and not alone:
                self._cache.remove_sequence(job.seq_id)
                return False
        if job.begin is None:
            job.begin = job.cached = cached
        self._waited[job] = 0
        return True

    def adopt(self, job: Job, *, alone: bool) -> bool:
        """Let a running generation that finds no room be a long one; return whether it is one now.

        It has to have a block that can be moved now, or be `alone` and hold half of the pool.
        """
        elsewhere = self._cache.elsewhere
        if elsewhere is None or not isinstance(job, Generation):
            return False
        large = alone and elsewhere.local_pages(job.seq_id) >= elsewhere.total_pages // 2
        if not elsewhere.move_oldest(job.seq_id, job.tokens) and not large:
            return False
        self._waited[job] = 0
        return True

    def forget(self, job: Job) -> None:
        """Forget a generation that has ended or was preempted."""
        if isinstance(job, Generation):
            self._waited.pop(job, None)
            self._granted.pop(job, None)
            self._relieved.discard(job)
            self._left.pop(job, None)
            self._no_room.discard(job)

    def room(self, job: Generation, count: int) -> int:
        """Return how many of the next `count` tokens can be computed now; take pages for them."""
        elsewhere = self._cache.elsewhere
        if elsewhere is None:
            return 0
        count = min(count, self._most_rows(elsewhere, job))
        length = self._cache.planned_length(job.seq_id)
        local = elsewhere.local_pages(job.seq_id)
        self._move(elsewhere, job, local + self._pages(count) - self._keeps(elsewhere, job))
        found = elsewhere.grow_some(job.seq_id, length + count, self._leaving(elsewhere, job))
        found = min(found, count)
        if found < count:
            self._move(elsewhere, job, self._pages(count - found))
        if found:
            self._waited[job] = 0
            self._no_room.discard(job)
            self._granted[job] = found
        else:
            self._no_room.add(job)
        return found

    def fit(
        self, decodes: list[tuple[Generation, Chunk]], counts: dict[Job, int]
    ) -> tuple[list[tuple[Generation, Chunk]], dict[Job, int]]:
        """Return the decodes, and the prompts with their token counts, that creditors answer.

        Long generations whose rows together exceed what a creditor answers in a step take turns:
        those that have waited longest come first, and decodes before prompts.
        """
        elsewhere = self._cache.elsewhere
        rows: list[tuple[Job, int]] = [(job, 1) for job, _ in decodes if job in self]
        rows += [(job, count) for job, count in counts.items() if job in self and job.started]
        if elsewhere is None or len(rows) < 2:
            return decodes, counts
        self._plans += 1
        rows.sort(key=lambda each: self._turns.get(each[0], 0))
        fitting = elsewhere.fitting([(job.seq_id, count) for job, count in rows])
        out = {job for (job, _), fits in zip(rows, fitting, strict=True) if not fits}
        self._turns = {
            job: self._turns.get(job, 0) if job in out else self._plans for job, _ in rows
        }
        if out:
            decodes = [(job, chunk) for job, chunk in decodes if job not in out]
            counts = {job: count for job, count in counts.items() if job not in out}
        return decodes, counts

    def make_room(self, job: Job, running: Sequence[Generation]) -> bool:
        """Return whether pages for another job come free soon, as blocks are moved away.

        For one that fits the pool, those of any generation, as soon as a borrowed block is there.
        """
        elsewhere = self._cache.elsewhere
        if elsewhere is None:
            return False
        patient = self.patient(job)
        if not patient:
            self.press(1)
            if elsewhere.moving(job.seq_id):
                return True
        for other in reversed(running):
            if other in self._waited and other is not job:
                if elsewhere.moving(other.seq_id):
                    return True
                if elsewhere.move_oldest(other.seq_id, other.tokens):
                    self._quiet = 0
                    return True
        if patient:
            return False
        if self._relieve(elsewhere, running):
            return True
        self._unmet += 1
        return False

    def press(self, tokens: int) -> None:
        """Note that another job lacks room for so many tokens: long ones make some."""
        self._pressing = max(self._pressing, self._pages(tokens))

    def impatient(self, job: Job) -> bool:
        """Whether a long generation has waited long enough to preempt others, or waits for nothing.

        Several may each hold a part of a block and no full one, so that blocks do not help. One
        that is not `patient` waits for nobody.
        """
        elsewhere = self._cache.elsewhere
        if elsewhere is None or not isinstance(job, Generation):
            return False
        if not self.patient(job):
            return True
        if self._waited.get(job, 0) >= IMPATIENT:
            return True
        hope = self._others or any(
            elsewhere.moving(one.seq_id) or elsewhere.movable(one.seq_id) for one in self._waited
        )
        return not hope

    def sweep(self) -> None:
        """Note that some time has passed."""
        elsewhere = self._cache.elsewhere
        self._quiet += 1
        for job in self._no_room if elsewhere is not None else ():
            moving = elsewhere is not None and elsewhere.moving(job.seq_id) > 0
            self._waited[job] = 0 if moving else self._waited[job] + 1

    def stuck(self, job: Generation) -> bool:
        """Whether a long generation has made no progress since a sweep, and moves nothing."""
        return job in self._no_room and self._waited.get(job, 0) > 0

    def _move(self, elsewhere: BlocksElsewhere, job: Generation, pages: int) -> None:
        """Have blocks of a generation leave until `pages` pages come free, if that is possible."""
        per_block = elsewhere.block_tokens // self._cache.page_size
        pages -= elsewhere.moving(job.seq_id) * per_block
        while pages > 0 and elsewhere.move_oldest(job.seq_id, job.tokens):
            pages -= per_block
            self._quiet = 0

    def _lacking(self, elsewhere: BlocksElsewhere, running: Sequence[Generation]) -> int:
        """Return how many pages there are too few for each running generation to get another.

        Those that are `patient` leave these pages to the others. What blocks on their way
        will free counts as there. One that runs alone lacks nothing before it has filled the pool.
        """
        if len(running) < 2:
            return 0
        growing = sum(self._grows(job) for job in running if not self.patient(job))
        available = elsewhere.available_pages
        if growing > available:
            blocks = sum(elsewhere.moving(job.seq_id) for job in self._waited)
            available += blocks * elsewhere.block_tokens // self._cache.page_size
        return max(growing - available, self._unmet)

    def _relief(
        self, elsewhere: BlocksElsewhere, running: Sequence[Generation], lacking: int
    ) -> int:
        """Return how many blocks can move, one of each generation, to free the lacking pages."""
        if lacking <= 0:
            return 0
        movable = sum(elsewhere.movable(job.seq_id) for job in running if not self.patient(job))
        return min(-(-lacking * self._cache.page_size // elsewhere.block_tokens), movable)

    def _relieve(self, elsewhere: BlocksElsewhere, running: Sequence[Generation]) -> bool:
        """Begin to move a block of a running generation, which is a long one then.

        Those come first that are `patient`, and then those that are preempted last. Returns
        False if none has a block that can move, or if there is no borrowed block now. `adopt` is
        for one that runs alone.
        """
        if len(running) < 2:
            return False
        for job in sorted(running, key=lambda each: not self.patient(each)):
            if elsewhere.move_oldest(job.seq_id, job.tokens):
                if job not in self._waited:
                    self._waited[job] = 0
                    self._relieved.add(job)
                self._quiet = 0
                return True
        return False

    def _grows(self, job: Generation) -> bool:
        """Whether a generation may need another page than those for what it has to compute."""
        final = job.prompt_len + job.sampling.max_tokens
        return self._pages(final) > self._pages(job.target)

    def _fetch(self, elsewhere: BlocksElsewhere, running: Sequence[Generation]) -> None:
        """Fetch blocks where it is cheaper, as far as the running generations leave room.

        One block more stays free, so that a newcomer does not send them away at once.
        """
        leaving = elsewhere.block_tokens // self._cache.page_size
        leaving += sum(self._pages(self._to_come(job) + 1) for job in running)
        for job in self._waited:
            if elsewhere.away(job.seq_id):
                missing = job.target - self._cache.planned_length(job.seq_id)
                tokens = min(self._to_come(job) - missing, max(job.generated, LIKELY))
                steps = -(-missing // self._limits.rows) + tokens
                elsewhere.fetch_cheaper(job.seq_id, missing + tokens, steps, leaving)

    def _to_come(self, job: Generation) -> int:
        """Return how many tokens a generation still computes, at most."""
        final = job.prompt_len + job.sampling.max_tokens
        return max(final - self._cache.planned_length(job.seq_id), 0)

    def _share(self, elsewhere: BlocksElsewhere) -> int:
        """Return how many pages a long generation keeps, if blocks can be had.

        Beside others that is half of the pool, and several share it. Alone, one keeps what nobody
        else holds or may borrow, but for an eighth of the pool, in which its next chunk is computed
        while blocks leave: keys in the own pool are attended to beside those that are elsewhere,
        and cost no exchange.
        """
        total, per_block = elsewhere.total_pages, elsewhere.block_tokens // self._cache.page_size
        kept = total // 2
        sharing = [job for job in self._waited if self.patient(job)]
        if not self._others and len(sharing) < 2:
            room = sum(elsewhere.local_pages(job.seq_id) for job in sharing)
            room += elsewhere.spare_pages
            kept = max(kept, room - max(total // FREE_SHARE, 2 * per_block))
        return max((kept - self._pressed) // max(len(sharing), 1), per_block)

    def _keeps(self, elsewhere: BlocksElsewhere, job: Generation) -> int:
        """Return how many pages a long generation keeps: its share, and what came to stay.

        One that does not wait keeps all but the blocks that leave because somebody lacks a page.
        """
        if not self.patient(job):
            return elsewhere.total_pages
        stays = elsewhere.came_to_stay(job.seq_id) - self._left.get(job, 0)
        per_block = elsewhere.block_tokens // self._cache.page_size
        return self._share(elsewhere) + stays * per_block

    def _leaving(self, elsewhere: BlocksElsewhere, job: Generation) -> int:
        """Return how many pages a long generation leaves to others."""
        if self._waited.get(job, 0) >= IMPATIENT or not self.patient(job):
            return 0
        return self._others + min(self._pressed, elsewhere.total_pages // 2)

    def _most_rows(self, elsewhere: BlocksElsewhere, job: Generation) -> int:
        """Return how many rows the creditors compute for a generation in this step, at most."""
        granted = {other: count for other, count in self._granted.items() if other is not job}
        rows = self._limits.rows - sum(granted.values())
        if (answered := elsewhere.most_rows(job.seq_id)) is not None:
            used = sum(
                count / (elsewhere.most_rows(other.seq_id) or self._limits.rows)
                for other, count in granted.items()
            )
            rows = min(rows, int(answered * (1 - used)))
        keys = elsewhere.away(job.seq_id) * elsewhere.block_tokens * max(len(self._waited), 1)
        return max(min(rows, self._limits.row_keys // keys if keys else rows), 1)

    def _lacks(self, elsewhere: BlocksElsewhere, job: Generation) -> int:
        away = elsewhere.away(job.seq_id) - elsewhere.called_back(job.seq_id)
        known = away + elsewhere.moving(job.seq_id)
        least = 1 if job in self._no_room and not elsewhere.moving(job.seq_id) else 0
        if self.patient(job):
            return max(self._blocks_for(elsewhere, job) - known, least)
        found = elsewhere.local_pages(job.seq_id) + elsewhere.available_pages
        missing = self._pages(job.target) * self._cache.page_size - known * elsewhere.block_tokens
        missing -= found * self._cache.page_size
        return max(-(-missing // elsewhere.block_tokens), least)

    def _blocks_for(self, elsewhere: BlocksElsewhere, job: Generation) -> int:
        """Return how many blocks of a generation have no place here, with one to grow into."""
        keeps = self._keeps(elsewhere, job) if job in self._waited else self._share(elsewhere)
        pages = self._pages(job.target + elsewhere.block_tokens) - keeps
        return max(-(-pages * self._cache.page_size // elsewhere.block_tokens), 0)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._cache.page_size)
