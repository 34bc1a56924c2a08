"""How long an engine's own steps and puts took, as a bounded sample of many kinds. No torch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.latency import StepWork
from engine.scheduling import Chunk, Generation, Job
from kvcache.types import SeqId

__all__ = ["PutTiming", "StepTiming", "StepTimings", "step_work"]

KINDS, PER_KIND = 256, 4  # kinds that are kept, and the latest of each kind
RECENT = 512  # latest steps that are kept besides
SHORTEST_S = 1e-6  # what takes less has computed nothing
LONGEST_S = 3600.0  # what takes longer has been stopped in between
EVERY = 8  # of the steps that only decode, which are many and alike
T = TypeVar("T")


class StepTiming(NamedTuple):
    """A step and its duration."""

    work: StepWork
    seconds: float


class PutTiming(NamedTuple):
    """The bytes of a put, and the time spent on copying them, without any waits."""

    bytes: int
    seconds: float


class StepTimings:
    """The latest steps, and the latest steps and puts of each kind.

    A kind has the same sizes, to a factor of two, so rare sizes are kept as well as frequent ones.
    The latest steps say how fast the engine is now. Of steps that only decode, every eighth is
    timed. Steps are noted by the thread that steps, puts under the cache's lock; `steps` and `puts`
    may be called on any thread.
    """

    def __init__(self) -> None:
        self.row_multiple = 0  # of the runner's steps, as of `engine.latency.padded_rows`
        self._steps: _Kinds[StepTiming] = _Kinds()
        self._recent: deque[StepTiming] = deque(maxlen=RECENT)
        self._puts: _Kinds[PutTiming] = _Kinds()
        self._seen = 0

    def work_of(
        self, plan: Sequence[tuple[Job, Chunk]], length: Callable[[SeqId], int]
    ) -> StepWork | None:
        """Return what a planned step computes; None if it need not be timed."""
        self._seen += 1
        if self._seen % EVERY and max([len(chunk.tokens) for _, chunk in plan]) == 1:
            return None
        return step_work(plan, length)

    def add_step(self, work: StepWork, seconds: float) -> None:
        """Note the duration of a step."""
        if not SHORTEST_S <= seconds < LONGEST_S:
            return
        kind = (
            work.prompt_tokens.bit_length(), work.prompt_squares.bit_length() // 2,
            work.decodes.bit_length(), work.context.bit_length(),
        )  # fmt: skip
        timing = StepTiming(work, seconds)
        self._steps.add(kind, timing)
        self._recent.append(timing)

    def add_put(self, count: int, seconds: float) -> None:
        """Note a complete put of `count` bytes."""
        if count and SHORTEST_S <= seconds < LONGEST_S:
            self._puts.add(count.bit_length(), PutTiming(count, seconds))

    def steps(self) -> list[StepTiming]:
        """Return the steps that are kept: the latest of each kind, then others, the latest first.

        So the first ones say most.
        """
        recent = reversed(tuple(self._recent))
        found = (*self._steps.newest(), *recent, *self._steps.all())
        return list({id(timing): timing for timing in found}.values())

    def puts(self) -> list[PutTiming]:
        """Return the puts that are kept."""
        return self._puts.all()


def step_work(plan: Sequence[tuple[Job, Chunk]], length: Callable[[SeqId], int]) -> StepWork:
    """Return what a planned step computes; `length` returns the tokens present of a sequence."""
    tokens = squares = decodes = context = 0
    for job, chunk in plan:
        begin, count = length(chunk.seq_id), len(chunk.tokens)
        # The last token of a prompt, if it is all that is left, costs what a decode does.
        if count == 1 and chunk.sample and isinstance(job, Generation):
            decodes += 1
            context += begin
        else:
            tokens += count
            squares += (begin + count) ** 2 - begin**2
    return StepWork(tokens, squares, decodes, context)


class _Kinds(Generic[T]):
    """The latest values of each kind. Of too many kinds, the one without news for longest goes."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def add(self, kind: Hashable, value: T) -> None:
        kinds = self._kinds
        if kind in kinds:
            kinds.move_to_end(kind)
        else:
            if len(kinds) == KINDS:
                kinds.popitem(last=False)
            kinds[kind] = deque(maxlen=PER_KIND)
        kinds[kind].append(value)

    def newest(self) -> list[T]:
        """Return the latest of each kind."""
        return [kind[-1] for kind in tuple(self._kinds.values())]

    def all(self) -> list[T]:
        return [value for kind in tuple(self._kinds.values()) for value in tuple(kind)]
