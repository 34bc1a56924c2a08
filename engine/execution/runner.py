"""The interfaces that a stepper drives: a runner and a KV cache. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from engine.scheduling import Chunk
from kvcache.lease import Put
from kvcache.sequences import SequenceCache
from kvcache.types import SeqId

__all__ = ["DeviceLost", "Runner", "StepCache"]

Logits_co = TypeVar("Logits_co", covariant=True)


class DeviceLost(Exception):
    """The device computes nothing any more for this process: no step can succeed."""


class Runner(Protocol[Logits_co]):
    """Computes the KV of a step's chunks."""

    def run(self, chunks: Sequence[Chunk]) -> Logits_co:
        """Compute a step; return one row of logits for each chunk with `sample`.

        If it raises, no token of the step counts as present. `DeviceLost` ends the stepper.
        """
        ...


class StepCache(SequenceCache, Protocol):
    """The calls of `kvcache.cache.KVCache` that a stepper makes."""

    @property
    def persistent(self) -> bool:
        """Whether published pages survive this process."""
        ...

    def sweep(self) -> Collection[object]:
        """End expired leases and return them; free pages that have left quarantine."""
        ...

    def leases(self) -> Collection[object]:
        """Return the live leases."""
        ...

    def mark_send(self, seq_id: SeqId, put: Put, begin: int, end: int, /) -> None:
        """Send positions `[begin, end)` of a sequence: present ones now, others once computed."""
        ...

    def clear_mark(self, seq_id: SeqId, /) -> None:
        """Send nothing more of a sequence."""
        ...
