"""The requests that plans are made for: lengths and arrival times of a workload, at any rate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.protocol import BadRequest
from router.planning.phases import Arrival
from router.workload import LoadRequest, WorkloadConfig, open_workload

__all__ = ["Sample", "sample_requests"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests at one request per second on average. Other rates stretch the times between them.

    So runs at different rates differ in nothing but the rate.
    """

    arrivals: tuple[Arrival, ...]

    def at_rate(self, rate: float, count: int = 0) -> list[Arrival]:
        """Return the requests at `rate` per second, again and again until there are `count`."""
        rounds = max(1, -(-count // len(self.arrivals)))
        period = float(len(self.arrivals))
        return [
            Arrival((number * period + at_s) / rate, prompt, output)
            for number in range(rounds)
            for at_s, prompt, output in self.arrivals
        ]

    @property
    def mean_output(self) -> float:
        """The mean number of output tokens."""
        return sum(each.output for each in self.arrivals) / len(self.arrivals)

    @property
    def longest(self) -> int:
        """The most tokens of prompt and output of a request."""
        return max(each.prompt + each.output for each in self.arrivals)


def sample_requests(config: WorkloadConfig, count: int) -> Sample:
    """Return the first `count` requests of a workload.

    A trace's own times keep their pattern and are scaled to one request per second.

    Raises: `BadRequest` for fewer than two requests, and for one whose lengths are not known.
    """
    # A workload without times of its own gets them.
    if not open_workload(config).timed:
        config = replace(config, rate=1.0)
    requests = list(itertools.islice(open_workload(config).requests, count))
    if len(requests) < 2:
        raise BadRequest("a plan needs 2 requests or more")
    arrivals = [_arrival(number, request) for number, request in enumerate(requests)]
    return Sample(_per_second(arrivals))


def _arrival(number: int, request: LoadRequest) -> Arrival:
    output = request.body.get("max_tokens")
    if request.input_tokens is None or not isinstance(output, int) or request.at_s is None:
        raise BadRequest(
            f"request {number} of the workload does not say how many tokens it has; plans need "
            "token counts, as in a trace"
        )
    return Arrival(request.at_s, max(1, request.input_tokens), max(1, output))


def _per_second(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    ordered = sorted(arrivals)
    span = ordered[-1].at_s
    if span <= 0:
        raise BadRequest("all requests of the workload come at once, so they have no rate")
    scale = len(ordered) / span
    return tuple(Arrival(at_s * scale, prompt, output) for at_s, prompt, output in ordered)
