"""The time line of a run for Perfetto (https://ui.perfetto.dev), written by `router.timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.protocol import BadRequest
from engine.virtual import Row, Transfer
from router.simulation.experiment import RequestRecord
from router.simulation.fleet import VirtualFleet
from router.timeline import (
    EngineWork,
    TracedPut,
    TracedRequest,
    TracedStep,
    fleet_trace,
    traced_legs,
)

__all__ = ["Timeline"]


class Timeline:
    """Gathers what one run does."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineWork] = {}
        self._requests: list[TracedRequest] = []

    def observe(self, fleet: VirtualFleet) -> None:
        """Note steps and puts from now on."""
        for calls in fleet.engines.values():
            config = calls.engine.config
            work = self._engines[config.engine_id] = EngineWork(config.engine_id, config.role)
            calls.engine.steps.on_steps = partial(_add_steps, work)
        fleet.network.on_end = partial(self._add_put, fleet)

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Add the requests of the run, which have kept their legs."""
        self._requests += map(_traced, records)

    def write(self, path: Path) -> None:
        """Write the file. Raises `BadRequest` if that fails."""
        trace = fleet_trace([*self._engines.values()], self._requests)
        try:
            with path.open("wb") as file:
                file.writelines(trace.pieces({"clock": "seconds since the start"}))
        except OSError as error:
            raise BadRequest(f"--trace {path}: {error.strerror}") from None

    def _add_put(self, fleet: VirtualFleet, transfer: Transfer) -> None:
        self._engines[transfer.source.name].puts.append(
            TracedPut(
                transfer.began,
                fleet.network.now - transfer.began,
                round(transfer.size),
                target=transfer.target.name,
            )
        )


def _add_steps(work: EngineWork, row: Row, count: int) -> None:
    begin = row.began
    for seconds in row.durations(count):
        work.steps.append(TracedStep(begin, seconds, row.work.prompt_tokens, row.work.decodes))
        begin += seconds


def _traced(record: RequestRecord) -> TracedRequest:
    about = {
        "input_tokens": record.input_tokens, "output_tokens": record.output_tokens,
        "first_token_ms": _ms(record.first_token_s), "retries": record.retries,
        "error": record.error,
    }  # fmt: skip
    legs = traced_legs(record.legs, record.at_s, record.end_s * 1e3)
    return TracedRequest(str(record.number), record.at_s, record.end_s, [], legs, about)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
