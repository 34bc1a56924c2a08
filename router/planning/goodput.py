"""Goodput of instances: the highest rate at which enough requests meet their objectives.

A phase alone is held against its own objective, as in DistServe's algorithm 1. Both phases
together are held against both, jointly or each by itself, as in algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from engine.latency import StepWork
from router.planning.instances import Instance
from router.planning.phases import (
    NO_OVERHEAD,
    Arrival,
    Overhead,
    decode_ends,
    decode_order,
    prefill_batches,
    prefill_ends,
)
from router.planning.requests import Sample
from router.telemetry import Slo

__all__ = ["Attained", "Evaluator", "highest_rate", "least_count", "reaches"]

MOST_REQUESTS = 20_000  # of a run


@dataclass(frozen=True, slots=True)
class Attained:
    """Shares of requests that meet their objectives."""

    ttft: float
    tpot: float
    both: float

    def share(self, separate: bool) -> float:
        """Return the share that counts: the smaller one if they are `separate`."""
        return min(self.ttft, self.tpot) if separate else self.both


def highest_rate(passes: Callable[[float], bool], most: float, precision: float) -> float:
    """Return the highest rate that passes, up to `most`, by bisection; 0 if none is found.

    Ends when the interval is not longer than `precision`. If `most` itself passes, it is the
    answer.
    """
    if passes(most):
        return most
    low, high = 0.0, most
    while high - low > precision:
        middle = (low + high) / 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def least_count(count: int, share: float) -> int:
    """Return the fewest of `count` that are at least this share of them."""
    least = max(0, ceil(share * count) - 1)  # not more, whatever the rounding error
    return least if least / count >= share else least + 1


def reaches(met: Iterable[bool], count: int, share: float) -> bool:
    """Return whether at least this share of `count` is met.

    Takes no more of `met` than decide it: enough that are met, or too many that are not.
    """
    needed = least_count(count, share)
    spare = count - needed
    if not needed:
        return True
    for each in met:
        if each:
            needed -= 1
        else:
            spare -= 1
        if not needed or spare < 0:
            break
    return not needed


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Goodput, in requests per second, of instances under the requests of a sample.

    No goodput exceeds the rate at which an instance is saturated: above it, queues grow without
    end, however lax the objectives, which a sample of a finite length does not show.
    """

    sample: Sample
    slo: Slo
    target: float  # share of the requests
    separate: bool
    max_tokens: int  # of a prefill batch
    max_batch: int  # sequences of a decode batch
    kv_s: Callable[[int], float] = lambda tokens: 0.0  # seconds to move a prompt's KV
    overhead: Overhead = NO_OVERHEAD
    fills: float = 8.0  # how many times a run's requests fill what decodes at a time; 0: once
    precision: float = 0.01  # of the result, as a share of the saturation rate

    def prefill(self, instance: Instance) -> float:
        """Return the goodput of prefills alone: the share that meets the TTFT objective."""
        if self._ttft_alone(instance) < self.target:
            return 0.0
        return self._highest(
            self._prefill_saturation(instance), lambda rate: self._meets_ttft(instance, rate)
        )

    def decode(self, instance: Instance) -> float:
        """Return the goodput of decodes alone: the share that meets the TPOT objective."""
        if self._tpot_alone(instance) < self.target:
            return 0.0
        return self._highest(
            self._decode_saturation(instance), lambda rate: self._meets_tpot(instance, rate)
        )

    def joint(self, prefill: Instance, decode: Instance) -> float:
        """Return the goodput of a prefill and a decode instance together."""
        if min(self._ttft_alone(prefill), self._tpot_alone(decode)) < self.target:
            return 0.0
        most = min(self._prefill_saturation(prefill), self._decode_saturation(decode))
        return self._highest(most, lambda rate: self._meets_both(prefill, decode, rate))

    def attained(
        self, prefills: Sequence[Instance], decodes: Sequence[Instance], rate: float
    ) -> Attained:
        """Return the shares that a fleet attains at a rate; requests go round its instances."""
        arrivals = self._arrivals(rate)
        first = _spread(arrivals, prefills, self._prefill_ends)
        order, moved = self._moved(arrivals, first)
        last = dict(zip(order, _spread(moved, decodes, self._decode_ends), strict=True))
        ttft = [
            self.slo.meets_ttft(end - each.at_s) for end, each in zip(first, arrivals, strict=True)
        ]
        tpot = [
            self.slo.meets_tpot(_per_token(first[number], last[number], each.output))
            for number, each in enumerate(arrivals)
        ]
        both = [all(pair) for pair in zip(ttft, tpot, strict=True)]
        return Attained(_share(ttft), _share(tpot), _share(both))

    def _highest(self, most: float, passes: Callable[[float], bool]) -> float:
        return highest_rate(passes, most, self.precision * most)

    def _meets_ttft(self, instance: Instance, rate: float) -> bool:
        arrivals = self.sample.at_rate(rate)
        met = (
            self.slo.meets_ttft(end - arrivals[number].at_s)
            for first, last, end in self._prefill_batches(arrivals, instance)
            for number in range(first, last)
        )
        return reaches(met, len(arrivals), self.target)

    def _meets_tpot(self, instance: Instance, rate: float) -> bool:
        arrivals = self._arrivals(rate)
        met = (
            self.slo.meets_tpot(_per_token(arrivals[number].at_s, end, arrivals[number].output))
            for number, end in self._decode_order(arrivals, instance)
        )
        return reaches(met, len(arrivals), self.target)

    def _meets_both(self, prefill: Instance, decode: Instance, rate: float) -> bool:
        """Return whether `attained` has the share, without what does not matter to the answer."""
        arrivals = self._arrivals(rate)
        most_late = len(arrivals) - least_count(len(arrivals), self.target)
        first: list[float] = []
        late: set[int] = set()
        for begin, end, end_s in self._prefill_batches(arrivals, prefill):
            first += [end_s] * (end - begin)
            late.update(
                number
                for number in range(begin, end)
                if not self.slo.meets_ttft(end_s - arrivals[number].at_s)
            )
            if len(late) > most_late:
                return False
        order, moved = self._moved(arrivals, first)

        def met() -> Iterator[bool]:
            for place, end_s in self._decode_order(moved, decode):
                number = order[place]
                in_time = _per_token(first[number], end_s, arrivals[number].output)
                yield self.slo.meets_tpot(in_time) and (self.separate or number not in late)

        return reaches(met(), len(arrivals), self.target)

    def _moved(
        self, arrivals: Sequence[Arrival], first: Sequence[float]
    ) -> tuple[list[int], list[Arrival]]:
        """Return the requests by the time at which their KV has moved: numbers, and arrivals."""
        kv_s = {length: self.kv_s(length) for length in {each.prompt for each in arrivals}}
        moved = [end + kv_s[each.prompt] for end, each in zip(first, arrivals, strict=True)]
        order = sorted(range(len(moved)), key=moved.__getitem__)
        return order, [
            Arrival(moved[number], arrivals[number].prompt, arrivals[number].output)
            for number in order
        ]

    def _ttft_alone(self, instance: Instance) -> float:
        """Return the share that meets the TTFT objective if no request meets another."""
        pp, overhead = instance.division.pp, self.overhead.seconds
        return _share(
            [
                self.slo.meets_ttft(
                    pp * instance.step.seconds(StepWork(prompt, prompt**2)) + overhead(prompt)
                )
                for _, prompt, _ in self.sample.arrivals
            ]
        )

    def _tpot_alone(self, instance: Instance) -> float:
        """Return the share that meets the TPOT objective so, by the step of the first token."""
        pp, overhead = instance.division.pp, self.overhead.seconds
        return _share(
            [
                output < 2
                or self.slo.meets_tpot(
                    pp * instance.step.seconds(StepWork(decodes=1, context=prompt))
                    + overhead(prompt)
                )
                for _, prompt, output in self.sample.arrivals
            ]
        )

    def _arrivals(self, rate: float) -> list[Arrival]:
        """Return as many requests as it takes to fill the decode instances several times.

        Of those that meet their objective, at most `rate · output · TPOT` decode at a time.
        """
        at_a_time = rate * self.sample.mean_output * (self.slo.tpot_ms or 0.0) / 1e3
        return self.sample.at_rate(rate, min(MOST_REQUESTS, round(self.fills * at_a_time)))

    def _prefill_saturation(self, instance: Instance) -> float:
        """Return the rate of prefills if all requests are there from the start."""
        at_once = [Arrival(0.0, prompt, output) for _, prompt, output in self.sample.arrivals]
        return len(at_once) / max(self._prefill_ends(at_once, instance))

    def _decode_saturation(self, instance: Instance) -> float:
        """Return the rate of decodes with a full pool, by Little's law.

        A sequence is in the pool for as long as its steps, so longer outputs weigh more.
        """
        steps = size = context = 0.0
        for _, prompt, output in self.sample.arrivals:
            steps += output - 1
            size += (output - 1) * (prompt + output)
            context += (output - 1) * (prompt + output / 2)
        if not steps:
            return self._prefill_saturation(instance)
        pp = instance.division.pp
        batch = min(self.max_batch, max(1.0, instance.pool_tokens / (size / steps) / pp))
        tokens = batch * context / steps
        work = StepWork(decodes=round(batch), context=round(tokens))
        period = instance.step.seconds(work) + self.overhead.seconds(round(tokens))
        return batch / period / (steps / len(self.sample.arrivals))

    def _prefill_ends(self, arrivals: Sequence[Arrival], instance: Instance) -> list[float]:
        return prefill_ends(arrivals, instance, max_tokens=self.max_tokens, overhead=self.overhead)

    def _prefill_batches(
        self, arrivals: Sequence[Arrival], instance: Instance
    ) -> Iterator[tuple[int, int, float]]:
        return prefill_batches(
            arrivals, instance, max_tokens=self.max_tokens, overhead=self.overhead
        )

    def _decode_order(
        self, arrivals: Sequence[Arrival], instance: Instance
    ) -> Iterator[tuple[int, float]]:
        return decode_order(arrivals, instance, max_batch=self.max_batch, overhead=self.overhead)

    def _decode_ends(self, arrivals: Sequence[Arrival], instance: Instance) -> list[float]:
        return decode_ends(arrivals, instance, max_batch=self.max_batch, overhead=self.overhead)


def _spread(
    arrivals: Sequence[Arrival],
    instances: Sequence[Instance],
    run: Callable[[Sequence[Arrival], Instance], list[float]],
) -> list[float]:
    ends = [0.0] * len(arrivals)
    for number, instance in enumerate(instances):
        ends[number :: len(instances)] = run(arrivals[number :: len(instances)], instance)
    return ends


def _per_token(first_s: float, last_s: float, output: int) -> float | None:
    return (last_s - first_s) / (output - 1) if output > 1 else None


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met)
