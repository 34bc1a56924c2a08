"""The engines as a strategy sees them: pools by role, with the usual ways to choose from them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from router.base import Chunk, Request
from router.engines import Role
from router.legs import Attempt, LeaseGrant
from router.strategy.engine import Engine, Lease

__all__ = ["Cluster", "Pool"]

T = TypeVar("T")
DEEPEST = 16  # calls of strategies inside one another


class Pool:
    """Some engines; never empty.

    Excluded engines are avoided, not forbidden: if nothing else is left anywhere, an excluded one
    is chosen, and the calls collapse to one engine's.
    """

    __slots__ = ("_attempt", "_engines", "_name", "_others")

    def __init__(
        self, attempt: Attempt, name: str, engines: list[Engine], others: list[Engine]
    ) -> None:
        self._attempt = attempt
        self._name = name
        self._engines = engines
        self._others = others  # all of the cluster, used if the whole pool is excluded

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def least_loaded(self, exclude: Engine | Iterable[Engine] = ()) -> Engine:
        """Return the engine with the least of this router's work in flight; ties take turns."""
        unwanted = {exclude} if isinstance(exclude, Engine) else set(exclude)
        return self._least(
            [engine for engine in self._engines if engine not in unwanted]
            or [engine for engine in self._others if engine not in unwanted]
            or self._engines,
            _load,
        )

    def cheapest(self, cost: Callable[[Engine], Any]) -> Engine:
        """Return the engine with the lowest `cost`; ties take turns."""
        return self._least(self._engines, cost)

    def longest_prefix(self, request: Request) -> Engine:
        """Return the engine with most of the request's tokens cached; of ties, the least loaded."""
        return self.cheapest(lambda engine: (-engine.cached(request), engine.load))

    def round_robin(self) -> Engine:
        """Return each engine in turn, over all requests."""
        turn = self._attempt.runtime.registry.turn(self._name)
        return self._engines[turn % len(self._engines)]

    def _least(self, choice: list[Engine], cost: Callable[[Engine], Any]) -> Engine:
        first = self._attempt.runtime.registry.turn(self._name) % len(choice)
        return min(choice[first:] + choice[:first], key=cost)


class Named(Protocol):
    """A strategy, as far as a cluster knows it."""

    name: str


class OpenCall(Protocol):
    """A call of a strategy that has begun."""

    @property
    def running(self) -> bool:
        """Whether a task waits for its next chunk."""
        ...

    @property
    def innermost(self) -> AsyncGenerator[Chunk, None]:
        """The body that is waiting now."""
        ...

    async def aclose(self) -> None: ...


class Cluster:
    """The engines that this attempt may use: those that are up, without those that failed it.

    Roles are hints: if no engine has a role, engines for any role take its part, else all do.
    """

    __slots__ = ("_all", "_attempt", "_calls", "_states", "_within")

    def __init__(self, attempt: Attempt, states: dict[Any, Any]) -> None:
        """`states` holds what a revision remembers, by the strategy and the factory of each."""
        self._attempt = attempt
        self._states = states
        self._all = [Engine(attempt, backend) for backend in attempt.backends]
        self._within: tuple[Named, ...] = ()  # the strategies whose bodies run, the last is here
        self._calls: list[OpenCall] = []  # of strategies, by the body that sees this; not ended

    def _inside(self, strategy: Named) -> Cluster:
        """Return the same engines for the body of `strategy`, which the body that sees this calls.

        Raises `RecursionError` if too many bodies wait for each other.
        """
        if len(self._within) == DEEPEST:
            last = ", ".join(one.name for one in (*self._within[-3:], strategy))
            raise RecursionError(
                f"strategies call each other more than {DEEPEST} deep, at last {last}"
            )
        inner = object.__new__(Cluster)
        inner._attempt, inner._states, inner._all = self._attempt, self._states, self._all
        inner._within = (*self._within, strategy)
        inner._calls = []
        return inner

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
        """Return what `factory` made when a request of this activation first asked for it.

        All requests of one activation of the strategy share it for as long as that lives. The next
        activation, of the same strategy too, begins with its own. A strategy that another one calls
        has its own, which all calls of it in the activation share.
        """
        key = (self._within[-1:], factory)
        if key not in self._states:
            self._states[key] = factory()
        state: T = self._states[key]
        return state

    @property
    def replica(self) -> Lease | None:
        """The replica of this request, if it was mirrored and its engine has died.

        Pass it as `kv` to a generation on `replica.engine`, which resumes after the last token that
        has landed.
        """
        best = self._attempt.replicas.best()
        if best is None:
            return None
        grant = LeaseGrant(
            best.backend, best.lease_id, best.kv_addr, best.landed, best.landed, replica=best
        )
        return Lease(Engine(self._attempt, best.backend), grant)

    def _role(self, role: Role) -> Pool:
        engines = (
            [engine for engine in self._all if engine.role == role]
            or [engine for engine in self._all if engine.role == "any"]
            or self._all
        )
        return Pool(self._attempt, role, engines, self._all)


def _load(engine: Engine) -> int:
    return engine.load
