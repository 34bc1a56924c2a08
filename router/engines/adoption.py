"""Which model is served, and which engines may serve it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from engine.protocol import ALL_CAPABILITIES, EngineState, Internal, ModelInfo, Timeout
from router.base import Conflict
from router.engines.backend import Backend, Refusal
from router.model import ServedModel

__all__ = ["Adoption"]

log = logging.getLogger(__name__)

MODEL_S = 10.0  # a tokenizer may have megabytes
REFETCH_S = 1.0  # between two reads of one engine's model


class Adoption:
    """Admits the engines that have the served model.

    The first one decides which model that is, in the order of `backends`. Another model is served
    once no engine with the earlier one is up. Engines with other KV but the same name, tokenizer
    and vocabulary have the same model: they serve too, and exchange no KV with the first ones.
    """

    def __init__(self, backends: Callable[[], Iterable[Backend]], patience_s: float) -> None:
        """`patience_s`: how long an engine waits until those before it have answered."""
        self.served: ServedModel | None = None
        # Of the engines that have the served model: vocabulary and page size, by fingerprint.
        self._groups: dict[str, tuple[int, int]] = {}
        self._backends = backends
        self._patience_s = patience_s
        self._lock = asyncio.Lock()

    async def admit(self, backend: Backend, state: EngineState) -> None:
        """Return if `backend`, which has just reported `state`, may serve.

        Reads the model of a new process. Raises `Conflict` if other engines serve another model.
        Raises what the calls raise, and `Timeout`.
        """
        same = backend.state is not None and backend.state.epoch == state.epoch
        if same and backend.model is not None:
            if backend.status in ("up", "suspect"):
                return
            info = backend.model  # another model may have been adopted while it was down
        else:
            info = await self._fetch(backend, state)
        await self._predecessors(backend)
        async with self._lock:
            await self._adopt(backend, info, state.epoch)
            backend.model, backend.refusal = info, None
            self.note_contexts()

    def note_contexts(self) -> None:
        """Note the contexts and the KV of the engines that have the served model, also of those
        that are down."""
        if self.served is None:
            return
        if contexts := {model.context_length for _, model in self.serving()}:
            self.served.contexts = sorted(contexts)
        first = self.served.info.fingerprint
        kinds = {model.fingerprint for _, model in self.serving()} | {first}
        self._groups = {kind: self._groups[kind] for kind in kinds}
        self.served.uniform = kinds == {first}

    def _usable_contexts(self) -> set[int]:
        return {model.context_length for backend, model in self.serving() if backend.usable}

    def serving(self) -> list[tuple[Backend, ModelInfo]]:
        """Return the known engines that have the served model, and their descriptions of it."""
        return [
            (backend, backend.model)
            for backend in list(self._backends())
            if backend.model is not None and backend.model.fingerprint in self._groups
        ]

    async def _fetch(self, backend: Backend, state: EngineState) -> ModelInfo:
        refusal = backend.refusal
        if (
            refusal is not None
            and refusal.epoch == state.epoch
            and (refusal.final or self._stands(backend, refusal))
        ):
            raise Conflict(refusal.reason)  # without another look at its tokenizer
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, backend.fetched + REFETCH_S - clock()))
        backend.fetched = clock()
        try:
            async with asyncio.timeout(MODEL_S):
                info = await backend.client.model()
        except TimeoutError:
            raise Timeout(f"it did not tell its model within {MODEL_S:g} s") from None
        said = set(info.capabilities)
        can = [each for each in ALL_CAPABILITIES if each in said]  # each once
        return info if can == info.capabilities else info.model_copy(update={"capabilities": can})

    async def _predecessors(self, backend: Backend) -> None:
        """Before a first model is served, wait until the engines before `backend` have answered."""
        if self.served is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                for other in list(self._backends()):
                    if other is backend:
                        return
                    await other.settled.wait()

    async def _adopt(self, backend: Backend, info: ModelInfo, epoch: int) -> None:
        served, sizes = self.served, (info.vocab_size, info.page_size)
        if info.fingerprint in self._groups:
            if sizes != self._groups[info.fingerprint]:
                reason = f"its {info.name} has another vocabulary or page size than others like it"
                raise self._refused(backend, Refusal(epoch, reason, final=True))
            return
        difference = await asyncio.to_thread(served.difference, info) if served is not None else ""
        if served is not None and self._others_serve(backend):
            if difference:
                raise self._refused(backend, Refusal(epoch, difference, served.info.fingerprint))
            log.info("engine %s exchanges no KV with those of other weights or layout", backend.id)
            self._groups[info.fingerprint] = sizes
            return
        try:
            self.served = await asyncio.to_thread(ServedModel, info)
        except Internal as error:
            raise self._refused(backend, Refusal(epoch, error.message, final=True)) from error
        self.served.usable_contexts = self._usable_contexts
        if difference:
            self._groups.clear()
        self._groups[info.fingerprint] = sizes

    def _stands(self, backend: Backend, refusal: Refusal) -> bool:
        """Whether the model is still served because of which it was refused."""
        served = self.served.info.fingerprint if self.served is not None else None
        return refusal.served == served and self._others_serve(backend)

    def _others_serve(self, backend: Backend) -> bool:
        return any(
            other.model is not None and other.status != "down"
            for other in self._backends()
            if other is not backend
        )

    @staticmethod
    def _refused(backend: Backend, refusal: Refusal) -> Conflict:
        backend.refusal = refusal
        return Conflict(refusal.reason)
