"""Strategies of activations: installed ones, and ones whose source is stored by its hash."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from contextlib import suppress

from engine.protocol import BadRequest
from router.agreement.truth import Activation, Listed
from router.base import NotFound, StoreUnavailable
from router.rollout import Catalog
from router.store import SharedStore
from router.strategy import Bound, Strategy

__all__ = ["Sources"]

log = logging.getLogger(__name__)

LOAD_S = 10.0
KEPT = 256  # strategies that were loaded


class Sources:
    """Finds and loads them; a source is loaded only if it has the hash under which it is stored."""

    def __init__(self, store: SharedStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._loaded: OrderedDict[tuple[str, str], Strategy] = OrderedDict()
        self._texts: dict[str, bytes] = {}  # by hash
        self.differing: set[str] = set()  # installed here in another version

    def describe(self, bound: Bound) -> tuple[Activation, dict[str, bytes]]:
        """Return the activation of a listed strategy, with number 0, and its source by hash."""
        strategy, params = bound.strategy, bound.shown
        text, file = self._catalog.source(strategy.name)
        if not text:
            return Activation(0, strategy.name, params, strategy.source_sha256), {}
        source = text.encode()
        digest = hashlib.sha256(source).hexdigest()
        self._keep(digest, strategy)
        self._texts[digest] = source
        listed = Listed(digest, file)
        return Activation(0, strategy.name, params, digest, listed), {digest: source}

    async def bind(self, activation: Activation) -> Bound:
        """Return the strategy of an activation with its parameters, loaded if need be.

        Raises `NotFound` if it is not installed or its source is not stored, `BadRequest` if it
        has another hash, or cannot be loaded, or the parameters are invalid, `Timeout` if loading
        takes too long, and `StoreUnavailable`.
        """
        name, source = activation.name, activation.source
        if source is not None:
            return (await self.load(name, source)).bind(activation.params)
        found = self._catalog[name]
        if self._catalog.source(name)[0]:
            raise NotFound(f"no strategy {name!r} is installed", param="name")
        if activation.digest != found.source_sha256 and name not in self.differing:
            log.warning("strategy %s is installed in another version than elsewhere", name)
            self.differing.add(name)
        return found.bind(activation.params)

    async def load(self, name: str, source: Listed) -> Strategy:
        """Return a strategy of a stored source. Raises as `bind` does."""
        digest = source.digest
        if (known := self._loaded.get((digest, name))) is not None:
            self._loaded.move_to_end((digest, name))
            return known
        text = await self._text(source)
        where = source.file or f"<strategy {name}>"
        for one in await self._catalog.run_in_thread(text, where, limit_s=LOAD_S):
            self._keep(digest, one)
        if (loaded := self._loaded.get((digest, name))) is None:
            raise BadRequest(f"{where}: no strategy {name!r} in it", param="source")
        return loaded

    async def follow(self, listed: dict[str, Listed]) -> dict[str, str]:
        """List what other routers have loaded; return why some cannot be loaded here, by name."""
        failed: dict[str, str] = {}
        for name, source in listed.items():
            if self._digest(name) == source.digest:
                continue
            try:
                text = await self._text(source)
                await self._catalog.load_in_thread(
                    text, name=name, file=source.file, limit_s=LOAD_S
                )
                self._keep(source.digest, self._catalog[name])
            except StoreUnavailable:
                raise
            except Exception as error:  # noqa: BLE001  users' code raises anything
                failed[name] = str(error)
                log.warning("strategy %s cannot be loaded: %s", name, error)
        return failed

    def _digest(self, name: str) -> str:
        """Return the hash of a listed strategy's source, "" if there is none."""
        try:
            text, _ = self._catalog.source(name)
        except NotFound:
            return ""
        return hashlib.sha256(text.encode()).hexdigest() if text else ""

    async def keep(self, digests: set[str]) -> None:
        """Have exactly these sources here, so that any router can put them back into the store."""
        for digest in digests - self._texts.keys():
            with suppress(NotFound, BadRequest):
                await self._fetch(digest)
        for digest in self._texts.keys() - digests:
            del self._texts[digest]

    @property
    def texts(self) -> dict[str, bytes]:
        """The sources that are here, by hash."""
        return dict(self._texts)

    async def _text(self, source: Listed) -> str:
        if source.digest not in self._texts:
            await self._fetch(source.digest)
        return str(self._texts[source.digest], "utf-8")

    async def _fetch(self, digest: str) -> None:
        data = await self._store.source(digest)
        if data is None:
            raise NotFound(f"the source {digest} is not in the store", param="name")
        if hashlib.sha256(data).hexdigest() != digest:
            raise BadRequest(f"the source {digest} of the store has another hash")
        self._texts[digest] = data

    def _keep(self, digest: str, strategy: Strategy) -> None:
        self._loaded[digest, strategy.name] = strategy
        self._loaded.move_to_end((digest, strategy.name))
        while len(self._loaded) > KEPT:
            self._loaded.popitem(last=False)
