"""The engines as a strategy sees them: pools by role, with the usual ways to choose from them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from engine.protocol import Capability
from router.base import Chunk, Request
from router.engines import Role
from router.legs import Attempt, LeaseGrant
from router.strategy.engine import Engine, Lease

__all__ = ["Cluster", "Pool"]

T = TypeVar("T")
Fits = Callable[[Engine], bool]
DEEPEST = 16  # calls of strategies inside one another


class Pool:
    """Some engines; never empty.

    Excluded engines are avoided, not forbidden: if nothing else is left anywhere, an excluded one
    is chosen, and the calls collapse to one engine's. What narrows a pool never empties it either.
    """

    __slots__ = ("_all", "_attempt", "_engines", "_fits", "_name")

    def __init__(
        self,
        attempt: Attempt,
        name: str,
        engines: list[Engine],
        everywhere: list[Engine],
        fits: tuple[Fits, ...] = (),
    ) -> None:
        self._attempt = attempt
        self._name = name
        self._engines = engines
        self._all = everywhere  # of the cluster: those that fit are used if `engines` are excluded
        self._fits = fits  # what has narrowed the pool

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def where(self, **labels: str) -> Pool:
        """Return the engines with these labels, such as `kind="vllm"`, of this pool or else of any.

        If there is none, this pool: the fallback `unlabelled`.
        """
        found = self._fitting(lambda engine: labels.items() <= dict(engine.labels).items())
        if found is None:
            self._attempt.fallback("unlabelled", once=True)
        return found or self

    def able(self, *capabilities: Capability) -> Pool:
        """Return the engines that support all of `capabilities`, of this pool or else of any.

        If there is none, this pool: what its engines do not support raises `Unsupported`.
        """
        return self._fitting(lambda engine: all(map(engine.can, capabilities))) or self

    def sending_to(self, receiver: Engine) -> Pool:
        """Return `receiver` and the engines whose `remote_send` can fill a lease there, of this
        pool or else of any.

        If there is no other, the calls collapse to those of `receiver`: the fallback `not_sent`.
        """
        return self._paired(receiver, lambda engine: engine.sends_to(receiver))

    def receiving_from(self, sender: Engine) -> Pool:
        """Return `sender` and the engines with leases that it can fill; as `sending_to`."""
        return self._paired(sender, sender.sends_to)

    def least_loaded(self, exclude: Engine | Iterable[Engine] = ()) -> Engine:
        """Return the engine with the least work in flight (`Engine.load`); ties take turns."""
        unwanted = {exclude} if isinstance(exclude, Engine) else set(exclude)
        return self._least(
            [engine for engine in self._engines if engine not in unwanted]
            or [engine for engine in self._others() if engine not in unwanted]
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

    def _fitting(self, fits: Fits) -> Pool | None:
        """Return the engines that fit, of this pool or else of the cluster; `None` without any."""
        engines = [engine for engine in self._engines if fits(engine)]
        found = Pool(self._attempt, self._name, engines, self._all, (*self._fits, fits))
        found._engines = engines or found._others()
        return found if found._engines else None

    def _others(self) -> list[Engine]:
        return [engine for engine in self._all if all(fits(engine) for fits in self._fits)]

    def _paired(self, one: Engine, fits: Fits) -> Pool:
        found = self._fitting(lambda engine: engine == one or fits(engine))
        found = found or Pool(self._attempt, self._name, [one], [one])
        lone = found._engines == [one] and found._others() in ([one], [])
        if lone and not self._attempt.alone:
            self._attempt.fallback("not_sent", once=True)
        return found

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
        has landed. A replica of engines without `mirror` is collapsed: it is in the prefix cache.
        """
        best = self._attempt.replicas.best()
        if best is None:
            return None
        grant = LeaseGrant(
            best.backend, best.lease_id, best.kv_addr, best.landed, best.landed,
            collapsed=best.committed, replica=best,
        )  # fmt: skip
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
