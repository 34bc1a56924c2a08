"""Hidden states from one stage of workers to the next: torch.distributed, over gloo on CPUs."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.workers.exchange import WorkerSettings

__all__ = ["StageLink", "StageLost"]

# Longer than any step: a peer that has not answered by then is gone.
TIMEOUT = timedelta(seconds=600)


class StageLost(Exception):
    """The connection to another stage broke: its worker has ended, or leaves to meet a new one."""


class StageLink:
    """One worker's connections to those of the stages before and behind its own."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Meet the other workers. Raises `RuntimeError` if they do not come."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._rank, self._tp = settings.rank, settings.tp
        workers = settings.tp * settings.pp
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings.rendezvous}",
            rank=settings.rank,
            world_size=workers,
            timeout=TIMEOUT,
        )
        self._passing: tuple[dist.Work, torch.Tensor] | None = None

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Give hidden states to the worker of the next stage with the same part.

        Returns before that worker takes them, unless it has not taken the ones before. Raises
        `StageLost`.
        """
        hidden = hidden.contiguous()
        try:
            if self._passing is not None:
                self._passing[0].wait()
            work = dist.isend(hidden, self._rank + self._tp)
        except RuntimeError as error:
            raise _lost("next", error) from error
        self._passing = None if work is None else (work, hidden)

    def take_over(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the hidden states, [rows, width], of the stage before. Raises `StageLost`."""
        hidden = torch.empty((rows, width), dtype=dtype)
        try:
            dist.recv(hidden, self._rank - self._tp)
        except RuntimeError as error:
            raise _lost("previous", error) from error
        return hidden

    def close(self) -> None:
        """Leave the others: their calls that wait for this worker fail."""
        self._passing = None
        dist.destroy_process_group()


def _lost(stage: str, error: RuntimeError) -> StageLost:
    said = str(error).partition(". This is typically")[0]
    return StageLost(f"the {stage} stage does not answer: {said}")
