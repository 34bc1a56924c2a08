"""Brings the engines to what is wanted of the pinned prefixes, and keeps them there."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from engine.protocol import MicroserveError, NoCapacity, PageName, Sampling, Timeout
from router.base import EngineUnreachable, NobodyListens, Request
from router.engines import Backend, guard
from router.legs import Runtime
from router.pins.copies import make_copy, pinned_at, unpin_at
from router.pins.pin import Copy, Pin, State
from router.pins.placement import (
    Placement,
    can_take,
    check_room,
    leaves,
    placement,
    ranked,
    source_of,
)
from router.telemetry import Events

__all__ = ["Reconciler"]

T = TypeVar("T")
log = logging.getLogger(__name__)

CHECK_S = 60.0  # between two questions to an engine whether it still has a copy pinned
CALLS = 16  # to an engine at a time, beside the one that makes a copy
KNOWN_S = 1.0  # longest wait for what engines have cached
Fleet = list[tuple[Backend, int, bool]]


class Reconciler:
    """Works on each pin in a task of its own, whenever the pin or the fleet has changed.

    An engine is given one copy at a time. After a failure the pin is worked on again, after pauses
    that grow.
    """

    def __init__(self, runtime: Runtime, pins: dict[PageName, Pin], events: Events) -> None:
        """`pins` may change at any time; `look` must be called then."""
        self._runtime = runtime
        self._registry = runtime.registry
        self._pins = pins
        self._events = events
        self._clock = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._fleet: Fleet = []
        self._calls: weakref.WeakKeyDictionary[Backend, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        # Held while a copy is made there.
        self._locks: weakref.WeakKeyDictionary[Backend, asyncio.Lock] = weakref.WeakKeyDictionary()

    def look(self, pin: Pin) -> None:
        """Work on `pin`, whose wants have changed."""
        pin.due = -math.inf
        pin.pauses.reset()
        if pin.task is not None:
            pin.task.cancel()
        self._wake.set()

    def check(self) -> None:
        """Ask the engines soon whether they still have their copies."""
        for pin in self._pins.values():
            pin.check_at = pin.due = -math.inf
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled; then unpin all copies, for `release_timeout_s` at most."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._start(tasks)
                    pause = self._runtime.config.health_interval_s if self._pins else None
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            await self._wake.wait()
                    self._wake.clear()
        finally:
            await self._unpin_all()

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        """Start to work on the pins that are due; end copies to engines that take no more."""
        now, fleet = self._clock(), self._fleet_now()
        changed, self._fleet = fleet != self._fleet, fleet
        for pin in list(self._pins.values()):
            if pin.task is not None:
                if changed:  # it may have looked at the fleet before
                    pin.due = -math.inf
                if pin.target is not None and not pin.target.usable:
                    pin.task.cancel()
            elif pin.due <= now or changed:
                pin.due = math.inf
                pin.task = tasks.create_task(self._work(pin), name=f"pin {pin.id}")
                # Not in the task itself: it may be cancelled before it begins.
                pin.task.add_done_callback(partial(self._ended, pin))

    def _fleet_now(self) -> Fleet:
        """Return the processes, and which of them may keep copies."""
        return [
            (each, _epoch(each), each.status in ("up", "suspect") and not leaves(each))
            for each in self._registry
        ]

    async def _work(self, pin: Pin) -> bool:
        """Do what can be done for a pin now; return whether that was all."""
        try:
            return await self._settle(pin)
        except Exception as error:  # concerns this pin only; the router must go on
            log.exception("the pin %s failed", pin.id)
            pin.error = f"the router failed: {type(error).__name__}: {error}"
            return False

    def _ended(self, pin: Pin, task: asyncio.Task[bool]) -> None:
        """Note when to look at a pin again."""
        pin.task = pin.target = None
        if task.cancelled():
            pin.due = -math.inf
        elif task.result():
            pin.pauses.reset()
        elif pin.due == math.inf:
            pin.due = self._clock() + pin.pauses.next()
        pin.due = min(pin.due, pin.check_at)
        if pin.due == -math.inf:
            self._wake.set()
        if not pin.wanted and not pin.placed:
            self._pins.pop(pin.id, None)

    async def _settle(self, pin: Pin) -> bool:
        """Return whether nothing is left to do until the fleet or the pin changes."""
        await self._check(pin)
        while True:
            todo = placement(pin, list(self._registry))
            dropped = [await self._unpin(pin, backend) for backend in todo.drop]
            if not pin.wanted:
                self._note(pin, "unpinning")
                return all(dropped)
            if not (todo.named or todo.missing or todo.absent):
                if all(dropped):
                    pin.error = ""
                self._note(pin, "pinned")
                return all(dropped)
            if (failure := await self._place(pin, todo)) is not None:
                for backend in todo.surplus:  # its room may be what others wait for
                    await self._unpin(pin, backend)
                self._note(pin, failure)
                return False

    async def _check(self, pin: Pin) -> None:
        """Ask the engines whether they still have their copies, if it is time for that."""
        if self._clock() < pin.check_at:
            return
        pin.check_at = self._clock() + CHECK_S
        request = _request(pin)
        for backend, copy in list(pin.placed.items()):
            if pin.wanted and pin.complete(backend) and backend.status == "up":
                try:
                    async with self._calls_to(backend):
                        copy.tokens = await self._bounded(
                            pinned_at(self._runtime, request, backend)
                        )
                except NoCapacity:  # others have ended it and taken its room
                    copy.tokens = 0
                except MicroserveError as error:  # its health decides what becomes of the copy
                    log.info("pin %s is not checked on engine %s: %s", pin.id, backend.id, error)

    async def _place(self, pin: Pin, todo: Placement) -> State | None:
        """Make the missing copies; return why some of them could not be made."""
        request, prefixes = _request(pin), self._registry.prefixes
        await self._known()
        named: State | None = "waiting for an engine" if todo.absent else None
        other: State = "waiting for an engine"
        for backend in todo.named:
            named = await self._tried(pin, request, backend) or named
        left = todo.missing
        for backend in ranked(todo.others, prefixes, request) if left else ():
            if (failure := await self._tried(pin, request, backend)) is not None:
                other = failure
                continue
            left -= 1
            if not left:
                break
        return other if left else named

    async def _tried(self, pin: Pin, request: Request, target: Backend) -> State | None:
        """Make a copy on `target`; return why it could not be made."""
        try:
            await self._make(pin, request, target)
        except MicroserveError as error:
            pin.error = error.message
            self._runtime.metrics.pin_failures.labels(error.type).inc()
            log.info("pin %s on engine %s: %s", pin.id, target.id, error)
            if target in pin.placed:  # nothing may stay pinned in part while it waits for room
                await self._unpin(pin, target)
            return "waiting for room" if isinstance(error, NoCapacity) else "copying"
        return None

    async def _make(self, pin: Pin, request: Request, target: Backend) -> None:
        """Make a copy on `target`, once it makes no other. Raises what `make_copy` raises."""
        async with self._locks.setdefault(target, asyncio.Lock()):
            if not can_take(pin, target):
                raise EngineUnreachable(f"engine {target.id} takes no copies now")
            state = await self._bounded(guard(target.client.state(), target))
            check_room(pin, target, state, self._pins.values())
            self._note(pin, "copying")
            pin.target = target
            copy = pin.placed[target] = Copy(_epoch(target))
            source = source_of(pin, target, list(self._registry), self._registry.prefixes, request)
            how = await self._bounded(make_copy(self._runtime, request, target, source))
            pin.target = None
            copy.tokens = len(request.tokens)
            self._runtime.metrics.pin_copies_made.labels(how).inc()

    async def _unpin(self, pin: Pin, backend: Backend) -> bool:
        """End what is pinned of it on an engine; return False if the engine was not told.

        Engines that have been removed are told once.
        """
        release_s = self._runtime.config.release_timeout_s
        if not backend.can("pin"):  # a new process, of another kind
            pin.placed.pop(backend, None)
            return True
        try:
            async with self._calls_to(backend), asyncio.timeout(release_s):
                await unpin_at(self._runtime, pin.tokens.tolist(), backend)
        except (MicroserveError, TimeoutError) as error:
            known = any(each is backend for each in self._registry)
            if known and not isinstance(error, NobodyListens):
                pin.error = f"unpin on engine {backend.id}: {str(error) or 'timeout'}"
                return False
        pin.placed.pop(backend, None)
        return True

    def _calls_to(self, backend: Backend) -> asyncio.Semaphore:
        return self._calls.setdefault(backend, asyncio.Semaphore(CALLS))

    async def _known(self) -> None:
        """Wait until the engines have said what they have cached, for a while."""

        async def known(backend: Backend) -> None:
            with suppress(EngineUnreachable):
                await guard(self._registry.prefixes.known(backend), backend)

        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                told = (each for each in self._registry if each.usable and each.can("prefixes"))
                await asyncio.gather(*(known(each) for each in told))

    async def _bounded(self, call: Coroutine[Any, Any, T]) -> T:
        limit_s = self._runtime.config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise Timeout(f"it took longer than {limit_s:g} s") from None

    def _note(self, pin: Pin, state: State) -> None:
        """Note a state; publish an event if it, or where the copies are, has changed."""
        if state != pin.state:
            pin.state, pin.since = state, time.time()
        present = pin.present()
        if (told := (state, *present)) != pin.told:
            pin.told = told
            self._events.publish(
                "pin", id=pin.id, state=state, copies=pin.wanted, present=present,
                error=pin.error or None,
            )  # fmt: skip

    async def _unpin_all(self) -> None:
        """Leave no pin behind on the engines that answer: nobody else knows of these pins."""
        there: defaultdict[Backend, list[Pin]] = defaultdict(list)
        for pin in self._pins.values():
            for backend in pin.placed:
                if not backend.can("pin"):
                    continue
                there[backend].append(pin)

        async def end(backend: Backend, pins: list[Pin]) -> None:
            with suppress(MicroserveError):
                for pin in pins:
                    body = {"prompt": pin.tokens.tolist()}
                    await guard(backend.client.unpin(body, {}), backend)
                    del pin.placed[backend]

        with suppress(TimeoutError):
            async with asyncio.timeout(self._runtime.config.release_timeout_s):
                await asyncio.gather(*(end(*each) for each in there.items()))


def _request(pin: Pin) -> Request:
    """Return a request whose prompt is the prefix, and which computes it."""
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Request(uuid.uuid4().hex, pin.tokens.tolist(), sampling)


def _epoch(backend: Backend) -> int:
    return backend.state.epoch if backend.state is not None else -1
