"""Which strategy runs: generations, swapped atomically; a request keeps the one it began with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from router.errors import Conflict
from router.ids import GenerationNumber
from router.strategy import Bound

__all__ = ["Generation", "Generations"]


@dataclass(eq=False, slots=True)
class Generation:
    """One activation of a strategy with params. `in_flight` counts its running requests."""

    number: GenerationNumber
    bound: Bound
    before: Generation | None = field(repr=False)  # what a rollback goes back to
    in_flight: int = 0

    def describe(self) -> dict[str, Any]:
        return {
            "generation": self.number,
            "name": self.bound.strategy.name,
            "params": self.bound.params,
            "in_flight": self.in_flight,
        }


class Generations:
    """The active generation and the older ones that still have requests in flight.

    Numbers only grow, also on a rollback, so that `if_generation` never meets an old number again.
    Everything here happens between two awaits of one event loop: no lock is needed.
    """

    def __init__(self, first: Bound, *, history: int = 64) -> None:
        self.active = Generation(GenerationNumber(1), first, None)
        self._history = history
        self._draining: dict[GenerationNumber, Generation] = {}

    def activate(self, bound: Bound, *, if_generation: int | None = None) -> Generation:
        """Make `bound` active for new requests. Raises `Conflict` if `if_generation` is not it."""
        if if_generation is not None and if_generation != self.active.number:
            raise Conflict(
                f"generation {self.active.number} is active, not {if_generation}",
                param="if_generation",
            )
        return self._swap(bound, before=self.active)

    def rollback(self) -> Generation:
        """Back to what ran before the active one, as a new generation. Raises `Conflict`."""
        if (before := self.active.before) is None:
            raise Conflict("there is no generation before this one")
        return self._swap(before.bound, before=before.before)

    @contextmanager
    def enter(self) -> Iterator[Generation]:
        """The active generation, read once, and counted as in use until the body is left."""
        generation = self.active
        generation.in_flight += 1
        try:
            yield generation
        finally:
            generation.in_flight -= 1
            if generation.in_flight == 0:
                self._draining.pop(generation.number, None)

    def live(self) -> list[Generation]:
        """The active generation first, then the older ones that are still in use."""
        return [self.active, *reversed(self._draining.values())]

    def _swap(self, bound: Bound, *, before: Generation | None) -> Generation:
        old = self.active
        if old.in_flight:
            self._draining[old.number] = old
        self.active = Generation(GenerationNumber(old.number + 1), bound, before)
        self._forget()
        return self.active

    def _forget(self) -> None:
        """Cut the chain of `before`s, which would otherwise grow with every swap."""
        generation: Generation | None = self.active
        for _ in range(self._history):
            if generation is None:
                return
            generation = generation.before
        if generation is not None:
            generation.before = None
