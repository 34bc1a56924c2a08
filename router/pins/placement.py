"""Where the copies of a pinned prefix are kept and made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.protocol import EngineState, NoCapacity
from router.base import Request
from router.engines import Backend, PrefixIndex
from router.pins.pin import Pin, shared_tokens

__all__ = [
    "Placement",
    "can_take",
    "check_room",
    "fits",
    "leaves",
    "placement",
    "ranked",
    "source_of",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """What is to be done for a pin.

    A copy is missing on each engine of `named`, and on `missing` of `others`. `absent`: how many
    engines are wanted by name and cannot take a copy now. `drop`: those that may have pinned some
    of it and need not. `surplus`: those whose copies can be spared once the others have been tried.
    """

    named: list[Backend]
    others: list[Backend]
    missing: int
    absent: int
    drop: list[Backend]
    surplus: list[Backend]


def placement(pin: Pin, backends: Collection[Backend]) -> Placement:
    """Compare what is wanted with what is there.

    A copy on an engine that is being drained counts only if that engine was named. It stays until
    the others are complete, since they can be copied from it.
    """
    complete = [backend for backend in backends if pin.complete(backend)]
    named = [backend for backend in backends if backend.id in pin.engines]
    there = [backend for backend in complete if backend.id in pin.engines]
    free = [each for each in complete if each.id not in pin.engines and not leaves(each)]
    free.sort(key=_cost)
    unnamed = pin.wanted - len(pin.engines)
    kept = [*there, *free[:unnamed]]
    lacking = [backend for backend in named if backend not in there and can_take(pin, backend)]
    absent = len(pin.engines) - len(there) - len(lacking)
    missing = max(0, unnamed - len(free))
    others = [
        backend
        for backend in backends
        if backend not in kept and backend.id not in pin.engines and can_take(pin, backend)
    ]
    lacks = bool(lacking or missing or absent)
    # An engine that does not answer is told when it does.
    ended = [each for each in pin.placed if each.status == "up" and each not in kept]
    # After a restart too: the pin may have come later.
    drop = [each for each in ended if not lacks or each not in complete]
    drop += [each for each in pin.placed if each not in backends and each not in drop]
    return Placement(lacking, others, missing, absent, drop, free[unnamed:])


def can_take(pin: Pin, backend: Backend) -> bool:
    """Whether the engine takes new work, and can ever pin the prefix."""
    return (
        backend.usable
        and not backend.breaker.resting
        and backend.model is not None
        and backend.model.fingerprint == pin.fingerprint
        and backend.can("pin")
        and fits(backend, len(pin.tokens))
    )


def fits(backend: Backend, tokens: int) -> bool:
    """Whether the engine can ever pin so many tokens: they must fit its context, with one to
    generate, and the half of its pool that may be pinned."""
    if backend.model is None or backend.state is None:
        return True
    return backend.holds(tokens + 1) and _pages(backend, tokens) <= _most(backend.state)


def check_room(pin: Pin, backend: Backend, state: EngineState, others: Iterable[Pin]) -> None:
    """Raise `NoCapacity` if the engine cannot pin the prefix beside what it has pinned.

    `state` is what the engine reports now. Pages that `others`, or `pin` itself, have pinned there
    count once.
    """
    there = [each for each in others if backend in each.placed]
    shared = max(
        (
            min(shared_tokens(pin.tokens, each.tokens), each.placed[backend].tokens)
            for each in there
        ),
        default=0,
    )
    wanted = _pages(backend, len(pin.tokens) - shared)
    pinned, most = state.pages.pinned, _most(state)
    if pinned + wanted > most:
        raise NoCapacity(
            f"engine {backend.id} has {pinned} of at most {most} pages pinned; {wanted} are wanted"
        )


def ranked(backends: Iterable[Backend], prefixes: PrefixIndex, request: Request) -> list[Backend]:
    """Return the engines in the order in which they take a copy.

    Engines that prefill come first: a copy saves them the computation, and a decode engine only a
    put. Then those that have most of it cached, those with fewer pinned pages, those with less
    load.
    """
    size = len(request.tokens)

    def order(backend: Backend) -> tuple[bool, int, int, int]:
        role, pinned, load = _cost(backend)
        return role, -prefixes.cached(backend, request, size, coming=False), pinned, load

    return sorted(backends, key=order)


def source_of(
    pin: Pin, target: Backend, backends: Sequence[Backend], prefixes: PrefixIndex, request: Request
) -> tuple[Backend, int] | None:
    """Return the engine to copy from, and how many tokens it has: a pinned copy, or the longest
    cached prefix that is longer than the target's."""
    size = len(request.tokens)
    peers = [
        backend
        for backend in backends
        if backend is not target and backend.status == "up" and backend.sends_to(target)
    ]
    if not target.can("commit"):
        return None
    if copies := [backend for backend in peers if pin.complete(backend)]:
        return min(copies, key=lambda backend: backend.load.total), size

    def cached(backend: Backend) -> int:
        same = backend.model is not None and backend.model.fingerprint == pin.fingerprint
        return prefixes.cached(backend, request, size, coming=False) if same else 0

    best = max(peers, key=lambda backend: (cached(backend), -backend.load.total), default=None)
    if best is None or cached(best) <= cached(target):
        return None
    return best, cached(best)


def leaves(backend: Backend) -> bool:
    """Whether it is being drained or removed."""
    ending = backend.state is not None and backend.state.draining
    return backend.draining or backend.leaving or ending


def _cost(backend: Backend) -> tuple[bool, int, int]:
    pinned = backend.state.pages.pinned if backend.state is not None else 0
    return backend.role == "decode", pinned, backend.load.total


def _pages(backend: Backend, tokens: int) -> int:
    size = backend.model.page_size if backend.model is not None else 1
    return -(-tokens // size)


def _most(state: EngineState) -> int:
    """Return how many pages the engine lets be pinned: half of its pool."""
    return state.pages.total // 2
