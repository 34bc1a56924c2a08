"""Which strategy runs: generations, swapped atomically; a request keeps the one it began with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router.base.errors import Conflict
from router.base.ids import GenerationNumber
from router.rollout.canary import Canary
from router.strategy.definition import Bound
from router.supervision.violations import Kind

__all__ = ["Generation", "Generations"]


@dataclass(eq=False, slots=True)
class Generation:
    """One activation of a strategy with params. `in_flight` counts its running requests."""

    number: GenerationNumber
    bound: Bound
    before: Generation | None = field(repr=False)  # what a rollback goes back to
    tell: Callable[[Generation, Kind, str], None] = field(repr=False)  # of each violation
    in_flight: int = 0
    violations: Counter[Kind] = field(default_factory=Counter)
    states: dict[Any, Any] = field(default_factory=dict, repr=False)  # what its strategy remembers

    @property
    def label(self) -> str:
        """Its name in errors and logs."""
        return f"strategy {self.bound.strategy.name} (generation {self.number})"

    def offend(self, kind: Kind, message: str) -> None:
        """Its strategy has done what it must not."""
        self.violations[kind] += 1
        self.tell(self, kind, message)

    def describe(self) -> dict[str, Any]:
        return {
            "generation": self.number,
            "name": self.bound.strategy.name,
            "params": self.bound.shown,
            "source_sha256": self.bound.strategy.source_sha256,
            "in_flight": self.in_flight,
            "offences": dict(self.violations),
        }


class Generations:
    """The active generation, a canary beside it, and older ones that still have requests in flight.

    Numbers only grow, also on a rollback, so that `if_generation` never meets an old number again.
    Everything here happens between two awaits of one event loop: no lock is needed.
    """

    def __init__(
        self,
        first: Bound,
        *,
        history: int = 64,
        on_offence: Callable[[Generation, Kind, str], None] = lambda *_: None,
    ) -> None:
        self._on_offence = on_offence
        self._last = GenerationNumber(1)
        self.active = Generation(self._last, first, None, on_offence)
        self.canary: Canary | None = None
        self.candidate: Generation | None = None  # the canary's
        self._history = history
        self._draining: dict[GenerationNumber, Generation] = {}

    def check(self, if_generation: int | None) -> None:
        """Raises `Conflict` if `if_generation` is given and is not the active one."""
        if if_generation is not None and if_generation != self.active.number:
            raise Conflict(
                f"generation {self.active.number} is active, not {if_generation}",
                param="if_generation",
            )

    def activate(self, bound: Bound, *, if_generation: int | None = None) -> Generation:
        """Make `bound` active for new requests; a canary ends. Raises as `check`."""
        self.check(if_generation)
        self.drop()
        return self._swap(self._new(bound, before=self.active))

    def try_out(
        self, bound: Bound, canary: Canary, *, if_generation: int | None = None
    ) -> Generation:
        """Give `bound` the canary's share of new requests. Raises as `check`; `Conflict` if there
        is a canary already."""
        self.check(if_generation)
        if self.candidate is not None:
            raise Conflict(f"generation {self.candidate.number} is a canary; end it first")
        self.canary, self.candidate = canary, self._new(bound, before=self.active)
        return self.candidate

    def promote(self) -> Generation:
        """Make the canary's generation the active one, under its own number."""
        if self.candidate is None:
            raise Conflict("there is no canary")
        candidate, self.candidate, self.canary = self.candidate, None, None
        return self._swap(candidate)

    def drop(self) -> Generation | None:
        """End the canary, if there is one; its requests in flight go on."""
        candidate, self.candidate, self.canary = self.candidate, None, None
        if candidate is not None and candidate.in_flight:
            self._draining[candidate.number] = candidate
        return candidate

    def rollback(self) -> Generation:
        """Back to what ran before the active one, as a new generation; a canary ends.

        Raises `Conflict` if nothing was active before.
        """
        if (before := self.active.before) is None:
            raise Conflict("there is no generation before this one")
        self.drop()
        return self._swap(self._new(before.bound, before=before.before))

    def enter(self) -> Generation:
        """The generation of a new request, read once, and in use until `leave`."""
        generation = self.active
        if self.canary is not None and self.candidate is not None and self.canary.takes_next():
            generation = self.candidate
        generation.in_flight += 1
        return generation

    def leave(self, generation: Generation) -> None:
        """A request of `generation` has ended."""
        generation.in_flight -= 1
        if generation.in_flight == 0:
            self._draining.pop(generation.number, None)

    def live(self) -> list[Generation]:
        """The active generation first, then a canary's, then older ones that are still in use."""
        trial = [self.candidate] if self.candidate is not None else []
        return [self.active, *trial, *reversed(self._draining.values())]

    def _new(self, bound: Bound, *, before: Generation | None) -> Generation:
        self._last = GenerationNumber(self._last + 1)
        return Generation(self._last, bound, before, self._on_offence)

    def _swap(self, new: Generation) -> Generation:
        old, self.active = self.active, new
        if old.in_flight:
            self._draining[old.number] = old
        self._forget()
        return new

    def _forget(self) -> None:
        """Cut the chain of `before`s, which would otherwise grow with every swap."""
        generation: Generation | None = self.active
        for _ in range(self._history):
            if generation is None:
                return
            generation = generation.before
        if generation is not None:
            generation.before = None
