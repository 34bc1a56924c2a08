"""The engines as a strategy sees them: pools by role, with the usual ways to choose from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from router.attempt import Attempt
from router.engine import Engine
from router.member import Role

__all__ = ["Cluster", "Pool"]


class Pool:
    """Some engines, never none. What is excluded is avoided, not forbidden: with nothing else
    left anywhere it is what you get, and the calls collapse to one engine's."""

    __slots__ = ("_attempt", "_engines", "_name", "_others")

    def __init__(
        self, attempt: Attempt, name: str, engines: list[Engine], others: list[Engine]
    ) -> None:
        self._attempt = attempt
        self._name = name
        self._engines = engines
        self._others = others  # of the cluster, where all of the pool is excluded

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def least_loaded(self, exclude: Engine | Iterable[Engine] = ()) -> Engine:
        """The one with the least of this router's work in flight; of equals, each in its turn."""
        unwanted = {exclude} if isinstance(exclude, Engine) else set(exclude)
        choice = (
            [engine for engine in self._engines if engine not in unwanted]
            or [engine for engine in self._others if engine not in unwanted]
            or self._engines
        )
        first = self._attempt.runtime.registry.turn(self._name) % len(choice)
        return min(choice[first:] + choice[:first], key=_load)

    def round_robin(self) -> Engine:
        """Each in its turn, over all requests."""
        turn = self._attempt.runtime.registry.turn(self._name)
        return self._engines[turn % len(self._engines)]


class Cluster:
    """The engines that this attempt may use: those that are up, without those that failed it.

    Roles are hints: where no engine has a role, those for any role take it, else all do.
    """

    __slots__ = ("_all", "_attempt")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._all = [Engine(attempt, member) for member in attempt.members]

    @property
    def engines(self) -> Pool:
        """All of them."""
        return Pool(self._attempt, "engines", self._all, self._all)

    @property
    def prefill(self) -> Pool:
        return self._role("prefill")

    @property
    def decode(self) -> Pool:
        return self._role("decode")

    def _role(self, role: Role) -> Pool:
        engines = (
            [engine for engine in self._all if engine.role == role]
            or [engine for engine in self._all if engine.role == "any"]
            or self._all
        )
        return Pool(self._attempt, role, engines, self._all)


def _load(engine: Engine) -> int:
    return engine.load
