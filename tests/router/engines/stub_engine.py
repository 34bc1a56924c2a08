"""An engine in this process: its health, state and model, and how often each was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tokenizers import Tokenizer, models

from engine.protocol import EngineState, ModelInfo
from router.engines.backend import Backend
from router.engines.circuit_breaker import CircuitBreaker

__all__ = ["StubEngine", "backend_of", "model_info", "no_time"]

TOKENIZER = Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0")).to_str()
PAGES = ("total", "free", "cached", "leased", "active", "quarantined", "pinned")


def model_info(**changes: Any) -> ModelInfo:
    fields = {
        "name": "fake", "context_length": 256, "vocab_size": 1000, "eos_token_ids": [0],
        "bos_token": None, "eos_token": "w0", "tokenizer_json": TOKENIZER, "chat_template": None,
        "fingerprint": "f", "page_size": 16, "kv_bytes_per_token": 4, **changes,
    }  # fmt: skip
    return ModelInfo(**fields)


class StubEngine:
    """The calls of one engine that a registry makes.

    `tells` has fields of its state. `does[call]` is awaited before the answer to a call, and may
    raise. `asked` counts the calls.
    """

    def __init__(self, id: str = "a", *, info: ModelInfo | None = None, **tells: Any) -> None:
        self.url = f"http://{id}:1"
        self.info = info or model_info()
        self.tells: dict[str, Any] = {"engine_id": id, **tells}
        self.does: dict[str, Callable[[], Awaitable[object]]] = {}
        self.asked: Counter[str] = Counter()
        self.closed = 0

    async def health(self) -> None:
        await self._ask("health")

    async def state(self) -> EngineState:
        await self._ask("state")
        fields = {
            "epoch": 1, "role": "any", "model": self.info.name, "page_size": 16,
            "pages": dict.fromkeys(PAGES, 0), "running": 0, "waiting": 0, "leases": [],
            "puts_in_flight": 0, "prefix_tokens": 0, **self.tells,
        }  # fmt: skip
        return EngineState(**fields)

    async def model(self) -> ModelInfo:
        await self._ask("model")
        return self.info

    def close(self) -> None:
        self.closed += 1

    async def _ask(self, call: str) -> None:
        self.asked[call] += 1
        if call in self.does:
            await self.does[call]()


def no_time() -> float:
    return 0.0


def backend_of(engine: Any) -> Backend:
    """Return the backend of a stub, as a registry would make it."""
    return Backend(engine, CircuitBreaker(5, 5.0, no_time))
