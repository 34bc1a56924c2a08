"""The table of pinned prefixes, as the admin API changes it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from engine.protocol import (
    BadRequest,
    ModelInfo,
    NoCapacity,
    PageName,
    Unsupported,
    page_names,
)
from router.base import Conflict, EngineId, NotFound
from router.engines import Backend
from router.legs import Runtime
from router.pins.pin import Pin
from router.pins.placement import fits
from router.pins.reconciler import Reconciler
from router.telemetry import Events

__all__ = ["Pins"]

MOST_TOKENS = 1 << 24  # of all pinned prefixes; 64 MiB
PREVIEW = 80  # characters


class Pins:
    """The prefixes that the fleet keeps, whatever its engines would evict (§3.5).

    Prefixes are told apart by their full pages; what follows the last of these is not kept. All
    copies of a prefix are on engines that have the same kind of KV.
    """

    def __init__(self, runtime: Runtime, events: Events) -> None:
        self._runtime = runtime
        self._pins: dict[PageName, Pin] = {}
        self._reconciler = Reconciler(runtime, self._pins, events)
        metrics = runtime.metrics
        metrics.pinned_prefixes.set_function(lambda: len(self._pins))
        metrics.pin_copies_wanted.set_function(lambda: sum(pin.wanted for pin in self))
        metrics.pin_copies.set_function(lambda: sum(len(pin.present()) for pin in self))

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def find(self, tokens: Sequence[int]) -> Pin:
        """Return the pin of a prefix. Raises `NotFound`, or `BadRequest` if it has no full page."""
        served = self._runtime.registry.model.info
        infos = [served, *(info for _, info in self._runtime.registry.serving())]
        ids = [_last_name(tokens, size) for size in {info.page_size for info in infos}]
        known = next((id for id in ids if id in self._pins), None)
        return self[known if known is not None else _id(tokens, served)]

    def __getitem__(self, id: str) -> Pin:
        """Return the pin with this id. Raises `NotFound`."""
        pin = self._pins.get(PageName(id))
        if pin is None or not pin.wanted:
            raise NotFound("this prefix is not pinned", param="prefix")
        return pin

    def pin(
        self,
        tokens: Sequence[int],
        preview: str = "",
        *,
        engine: str | None = None,
        copies: int | None = None,
    ) -> Pin:
        """Keep a prefix: on the engine with this id, or so many copies in all; by default one.

        Engines add up; a number of copies replaces the earlier one, and those on named engines
        count. Raises `BadRequest` for what can never be, `NotFound` for an unknown engine,
        `NoCapacity` beyond the limits, `Unsupported` if the engines cannot pin, and `Conflict` if
        the prefix is pinned on engines that exchange no KV with the named one.
        """
        info = self._info(tokens, engine)
        full = len(tokens) // info.page_size * info.page_size
        backends = [self._engine(engine)] if engine is not None else list(self._runtime.registry)
        if not any(fits(backend, full) for backend in backends if _has(backend, info)):
            raise BadRequest(
                f"{full} tokens exceed what can be pinned of an engine: half of its pool, and its "
                "context but one token",
                param="prefix",
            )
        id = _id(tokens, info)
        pin = self._pins.get(id)
        if copies is not None and pin is not None and copies < len(pin.engines):
            raise _fewer_than_named(pin)
        if pin is None:
            self._check_limits(full)
            pin = Pin(id, array("i", tokens[:full]), info.fingerprint, preview[:PREVIEW])
            self._pins[id] = pin
        before = pin.copies, list(pin.engines), pin.fingerprint
        pin.fingerprint = info.fingerprint  # another model may have been served before
        if engine is not None:
            pin.engines[EngineId(engine)] = None
        elif copies is not None or not pin.wanted:
            pin.copies = copies or 1
        if (pin.copies, list(pin.engines), pin.fingerprint) != before:
            self._reconciler.look(pin)
        return pin

    def unpin(self, pin: Pin, *, engine: str | None = None, copies: int | None = None) -> None:
        """Keep a prefix no longer: at all, on the engine with this id, or so many copies fewer.

        The copies stay cached until they are evicted. Raises `NotFound` if it is not wanted on that
        engine, and `BadRequest` if the copies left are fewer than the named engines.
        """
        if engine is not None:
            if EngineId(engine) not in pin.engines:
                raise NotFound(f"this prefix is not pinned to engine {engine!r}", param="engine")
            del pin.engines[EngineId(engine)]
        elif copies is not None and copies < pin.wanted:
            if pin.wanted - copies < len(pin.engines):
                raise _fewer_than_named(pin)
            pin.copies = pin.wanted - copies
        else:
            pin.copies = 0
            pin.engines.clear()
        self._reconciler.look(pin)

    def check(self) -> None:
        """Make sure soon that the engines still have what they had pinned."""
        self._reconciler.check()

    async def run(self) -> None:
        """Keep the prefixes until cancelled; then unpin them on the engines that answer."""
        await self._reconciler.run()

    def _info(self, tokens: Sequence[int], engine: str | None) -> ModelInfo:
        """Return the model as those engines have it that keep, or shall keep, a prefix."""
        registry = self._runtime.registry
        served, serving = registry.model.info, registry.serving()
        if engine is not None:
            named = self._engine(engine)
            named.require("pin")
            served = next((info for each, info in serving if each is named), served)
        pin = self._pins.get(_last_name(tokens, served.page_size))
        if pin is not None and pin.wanted and pin.fingerprint != served.fingerprint:
            for _, info in serving:
                if info.fingerprint == pin.fingerprint:
                    if engine is None:
                        return info
                    raise Conflict(
                        f"this prefix is pinned on engines that exchange no KV with {engine}; "
                        "unpin it first",
                        param="engine",
                    )
        if engine is not None:
            return served
        able = [info for each, info in serving if each.can("pin")]
        if serving and not able:
            raise Unsupported("no engine of this router supports pin", param="prefix")
        if not able or served.fingerprint in [info.fingerprint for info in able]:
            return served
        return able[0]

    def _engine(self, id: str) -> Backend:
        try:
            return self._runtime.registry[id]
        except NotFound as unknown:
            raise NotFound(unknown.message, param="engine") from None

    def _check_limits(self, tokens: int) -> None:
        most = self._runtime.config.max_pins
        if len(self._pins) >= most:
            raise NoCapacity(f"{most} prefixes are pinned, the limit")
        if sum(len(pin.tokens) for pin in self) + tokens > MOST_TOKENS:
            raise NoCapacity(f"the pinned prefixes would have more than {MOST_TOKENS} tokens")


def _has(backend: Backend, info: ModelInfo) -> bool:
    """Whether the engine has this very model, as far as is known."""
    return backend.model is None or backend.model.fingerprint == info.fingerprint


def _last_name(tokens: Sequence[int], page_size: int) -> PageName:
    """Return the name of the last full page; empty without one."""
    return next(reversed(page_names(tokens, page_size)), PageName(""))


def _id(tokens: Sequence[int], info: ModelInfo) -> PageName:
    if not (name := _last_name(tokens, info.page_size)):
        raise BadRequest(
            f"a prefix of {len(tokens)} tokens has no full page of {info.page_size}",
            param="prefix",
        )
    return name


def _fewer_than_named(pin: Pin) -> BadRequest:
    return BadRequest(
        f"{len(pin.engines)} engines are named, each for a copy: unpin these", param="copies"
    )
