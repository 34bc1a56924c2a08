"""Measures an engine's steps and puts, and fits DistServe's latency model (its appendix) to them.

Steps are timed by the engine itself, so that neither HTTP nor the router counts:

- a chunk of `count` prompt tokens after `start` cached ones, alone in its step;
- steps in which `batch` sequences decode after about `context` tokens each, and nothing else;
- puts of cached prefixes to a peer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from engine.latency import Fit, Measured, Profile, PutLatency, StepWork, fit_latency, fit_put
from engine.protocol import BadRequest, bad_request
from router.engines import HttpClient
from router.profiling.probe import Probe, patience

__all__ = ["Measurement", "measure"]

STARTS = (0, 256, 1024, 3072)
COUNTS = (8, 32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32, 256, 1024)
MOST_PROMPT = 16_384  # tokens to compute before one point of decoding
STEPS = 24  # of one point of decoding
OUTPUT = 1000  # tokens that a sequence may emit: the first ones wait for the prompts of the last
PUTS = (64, 256, 1024, 3072)
REPEATS = 3
WARM_UP = 3
NO_LINK = PutLatency(bandwidth=1e12)  # without a peer, puts are not measured


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of an engine."""

    steps: list[Measured]
    puts: list[tuple[int, float]]  # bytes, seconds
    profile: Profile


async def measure(
    engine: HttpClient,
    peer: HttpClient | None,
    *,
    name: str,
    device: str,
    say: Callable[[str], None],
) -> Measurement:
    """Measure an idle engine, and its puts to `peer` if there is one.

    Raises `BadRequest` if it is at work for others, has too little room, or cannot be measured.
    """
    probe = Probe(engine)
    await probe.meet()
    other = None
    if peer is not None:
        other = Probe(peer, seed=1)
        await other.meet()
        probe.check_puts(other)
    info, state = probe.info, probe.state
    longest = min(info.context_length, state.pages.total * state.page_size) - 1
    for _ in range(WARM_UP):
        await probe.compute(probe.prompt(min(64, longest)))
    steps = []
    for start, count in _chunks(longest):
        steps += await _chunk(probe, start, count)
    say(f"prompts: {len(steps)} steps")
    prompts = len(steps)
    for batch, context in _batches(longest, state.pages.total * state.page_size):
        steps.append(await _decode(probe, batch, context, min(OUTPUT, longest - context)))
    say(f"decodes: {len(steps) - prompts} batches")
    puts, put = [], NO_LINK
    if other is not None:
        puts = [
            each for tokens in PUTS if tokens < longest for each in await _put(probe, other, tokens)
        ]
        say(f"puts: {len(puts)}")
        put = fit_put(puts, info.layers)
    latency, fit = fit_latency(steps)
    profile = _profile(
        name=name,
        model=info.name,
        device=device,
        gpus=0,
        source=f"microserve profile: {prompts} steps with prompts, {len(steps) - prompts} batches "
        f"of decodes, {len(puts) or 'no'} puts",
        layers=info.layers,
        kv_bytes_per_token=info.kv_bytes_per_token,
        context_length=info.context_length,
        pool_tokens=state.pages.total * state.page_size,
        step=latency,
        put=put,
        fit=Fit(fit.prefill, fit.decode),
    )
    return Measurement(steps, puts, profile)


def _profile(**fields: Any) -> Profile:
    try:
        return Profile(**fields)
    except ValidationError as invalid:
        problem = bad_request(invalid).message
        raise BadRequest(f"what the engine says of itself makes no profile: {problem}") from None


def _chunks(longest: int) -> Iterator[tuple[int, int]]:
    for start in STARTS:
        for count in COUNTS:
            if start + count <= longest:
                yield start, count


def _batches(longest: int, pool: int) -> Iterator[tuple[int, int]]:
    for context in CONTEXTS:
        for batch in BATCHES:
            fits = context + 4 * STEPS <= longest and batch * (context + OUTPUT) <= pool
            if fits and batch * context <= MOST_PROMPT:
                yield batch, context


async def _chunk(probe: Probe, start: int, count: int) -> list[Measured]:
    """Time a chunk; nothing if the engine divides it into several steps."""
    page, took = probe.info.page_size, []
    start -= start % page
    prefix = probe.prompt(start)
    if start:
        await probe.compute(prefix + probe.prompt(1))
    for _ in range(REPEATS):
        done = await probe.compute(prefix + probe.prompt(count))
        if done.steps != 1 or done.prompt_tokens < count - 1:
            return []
        took.append(done.seconds)
    work = StepWork(prompt_tokens=count, prompt_squares=(start + count) ** 2 - start**2)
    return [Measured(work, statistics.median(took))]


async def _decode(probe: Probe, batch: int, context: int, tokens: int) -> Measured:
    async with probe.decoding(batch, context, tokens) as begun:
        before = await probe.counters()
        done = await probe.steps_later(before, STEPS)
    # The counters may be read in the middle of a step.
    if done.prompt_tokens or abs(done.output_tokens - batch * done.steps) > batch:
        raise BadRequest(f"{batch} sequences did not decode together")
    emitted = before.since(begun).output_tokens + done.output_tokens / 2  # in the middle
    work = StepWork(decodes=batch, context=batch * context + round(emitted))
    return Measured(work, done.seconds / done.steps)


async def _put(probe: Probe, peer: Probe, tokens: int) -> list[tuple[int, float]]:
    """Time the put of a prefix that `probe` has cached."""
    prompt = probe.prompt(tokens)
    await probe.compute([*prompt, *probe.prompt(1)])
    times = []
    for _ in range(REPEATS):
        name = probe.name()
        body = {"request_id": name, "prompt": prompt, "end": tokens}
        async with patience():
            lease = await peer.client.prep_recv(body, {})
            try:
                sending = {**body, "begin": lease.match_len, "kv_addr": lease.kv_addr}
                reply = await probe.client.remote_send(sending, {})
            finally:
                await peer.client.release({"request_id": name}, {})
        if reply.computed_tokens == 0 and reply.ms > 0 and reply.bytes > 0:
            times.append((reply.bytes, reply.ms / 1e3))
    times.sort(key=lambda put: put[1])
    return times[len(times) // 2 :][:1]
