"""Which model is served, and which engines may serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from engine.protocol import EngineState, Internal, ModelInfo, Timeout
from router.base import Conflict
from router.engines.backend import Backend, Refusal
from router.model import ServedModel

__all__ = ["Adoption"]

MODEL_S = 10.0  # a tokenizer may have megabytes
REFETCH_S = 1.0  # between two reads of one engine's model


class Adoption:
    """Admits the engines that have the served model.

    The first one decides which model that is, in the order of `backends`. Another model is served
    once no engine with the earlier one is up.
    """

    def __init__(self, backends: Callable[[], Iterable[Backend]], patience_s: float) -> None:
        """`patience_s`: how long an engine waits until those before it have answered."""
        self.served: ServedModel | None = None
        self._backends = backends
        self._patience_s = patience_s
        self._lock = asyncio.Lock()

    async def admit(self, backend: Backend, state: EngineState) -> None:
        """Return if `backend`, which has just reported `state`, may serve.

        Reads the model of a new process. Raises `Conflict` if other engines serve another model: KV
        could not move between them, and tokens would depend on the engine. Raises what the calls
        raise, and `Timeout`.
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
        """Note the contexts of the engines that have the served model, those that are down too."""
        if self.served is None:
            return
        if contexts := {model.context_length for _, model in self._serving()}:
            self.served.contexts = sorted(contexts)

    def _usable_contexts(self) -> set[int]:
        return {model.context_length for backend, model in self._serving() if backend.usable}

    def _serving(self) -> list[tuple[Backend, ModelInfo]]:
        """Return the known engines that have the served model, and their descriptions of it."""
        fingerprint = self.served.info.fingerprint if self.served is not None else None
        return [
            (backend, backend.model)
            for backend in list(self._backends())
            if backend.model is not None and backend.model.fingerprint == fingerprint
        ]

    async def _fetch(self, backend: Backend, state: EngineState) -> ModelInfo:
        refusal = backend.refusal
        if (
            refusal is not None
            and refusal.epoch == state.epoch
            and (refusal.final or self._in_conflict(backend, refusal.fingerprint))
        ):
            raise Conflict(refusal.reason)  # without another look at its tokenizer
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, backend.fetched + REFETCH_S - clock()))
        backend.fetched = clock()
        try:
            async with asyncio.timeout(MODEL_S):
                return await backend.client.model()
        except TimeoutError:
            raise Timeout(f"it did not tell its model within {MODEL_S:g} s") from None

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
        served = self.served.info if self.served else None
        if served is not None and served.fingerprint == info.fingerprint:
            sizes = (info.vocab_size, info.page_size)
            if sizes != (served.vocab_size, served.page_size):
                reason = f"its {info.name} has another vocabulary or page size than {served.name}"
                raise self._refused(backend, Refusal(epoch, info.fingerprint, reason, final=True))
            return
        if served is not None and self._in_conflict(backend, info.fingerprint):
            reason = f"it serves {info.name}, not the {served.name} served here"
            if info.name == served.name:
                reason = f"its {info.name} differs from the one served here, in weights or layout"
            raise self._refused(backend, Refusal(epoch, info.fingerprint, reason))
        try:
            self.served = await asyncio.to_thread(ServedModel, info)
        except Internal as error:
            refusal = Refusal(epoch, info.fingerprint, error.message, final=True)
            raise self._refused(backend, refusal) from error
        self.served.usable_contexts = self._usable_contexts

    def _in_conflict(self, backend: Backend, fingerprint: str) -> bool:
        """Whether other engines serve another model than that of `fingerprint`."""
        if self.served is None or self.served.info.fingerprint == fingerprint:
            return False
        return any(
            other.model is not None and other.status != "down"
            for other in self._backends()
            if other is not backend
        )

    @staticmethod
    def _refused(backend: Backend, refusal: Refusal) -> Conflict:
        backend.refusal = refusal
        return Conflict(refusal.reason)
