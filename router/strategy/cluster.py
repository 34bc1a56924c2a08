"""The engines as a strategy sees them: pools by role, with the usual ways to choose from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from router.base.request import Request
from router.engines.backend import Role
from router.legs.attempt import Attempt
from router.strategy.engine import Engine
from router.strategy.lease import Lease

__all__ = ["Cluster", "Pool"]

T = TypeVar("T")


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
        return self._least(
            [engine for engine in self._engines if engine not in unwanted]
            or [engine for engine in self._others if engine not in unwanted]
            or self._engines,
            _load,
        )

    def cheapest(self, cost: Callable[[Engine], Any]) -> Engine:
        """The one of which `cost` is least; of equals, each in its turn."""
        return self._least(self._engines, cost)

    def longest_prefix(self, request: Request) -> Engine:
        """The one that has most of the request's tokens cached; of equals, the least loaded."""
        return self.cheapest(lambda engine: (-engine.cached(request), engine.load))

    def round_robin(self) -> Engine:
        """Each in its turn, over all requests."""
        turn = self._attempt.runtime.registry.turn(self._name)
        return self._engines[turn % len(self._engines)]

    def _least(self, choice: list[Engine], cost: Callable[[Engine], Any]) -> Engine:
        first = self._attempt.runtime.registry.turn(self._name) % len(choice)
        return min(choice[first:] + choice[:first], key=cost)


class Cluster:
    """The engines that this attempt may use: those that are up, without those that failed it.

    Roles are hints: where no engine has a role, those for any role take it, else all do.
    """

    __slots__ = ("_all", "_attempt", "_states")

    def __init__(self, attempt: Attempt, states: dict[Any, Any]) -> None:
        """`states`: what the strategy's generation remembers, by what made it."""
        self._attempt = attempt
        self._states = states
        self._all = [Engine(attempt, backend) for backend in attempt.backends]

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

    def state(self, factory: Callable[[], T]) -> T:
        """What `factory` has made when the first request of this generation asked: the same for
        all of its requests, for as long as the generation lives. Another generation, of the same
        strategy too, begins with its own."""
        if factory not in self._states:
            self._states[factory] = factory()
        state: T = self._states[factory]
        return state

    @property
    def replica(self) -> Lease | None:
        """What an engine that died has left of this request elsewhere, if it was mirrored: `kv` for
        a generation on `replica.engine`, which goes on from the last token that has landed."""
        best = self._attempt.replicas.best()
        if best is None:
            return None
        engine = Engine(self._attempt, best.backend)
        return Lease(engine, best.lease_id, best.kv_addr, best.landed, best.landed, replica=best)

    def _role(self, role: Role) -> Pool:
        engines = (
            [engine for engine in self._all if engine.role == role]
            or [engine for engine in self._all if engine.role == "any"]
            or self._all
        )
        return Pool(self._attempt, role, engines, self._all)


def _load(engine: Engine) -> int:
    return engine.load
