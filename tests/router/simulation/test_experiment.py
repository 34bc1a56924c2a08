"""Runs in virtual time against queueing theory, and what runs refuse."""

from __future__ import annotations

import itertools
import random
from statistics import fmean, stdev

import pytest
from experiments import PROMPT, engine, experiment, served_in, strategy_file

from engine.latency import FittedLatency, FixedLatency
from engine.protocol import BadRequest, Internal
from engine.virtual import loop
from router.simulation import experiment as experiments_of
from router.simulation import run_experiment
from router.simulation.experiment import Outcome, RequestRecord
from router.workload import poisson

SEED = 3
STEP = FittedLatency(
    prefill=(4.0, 0.02, 1e-6), decode=(10.0, 2e-4, 0.05), large_decode=(10.0, 2e-4, 0.05)
)


def lindley(arrivals: list[float], service_s: float) -> list[float]:
    """Return the times from arrival to end of a first-come first-served queue with one server."""
    free, times = 0.0, []
    for at in arrivals:
        free = max(free, at) + service_s
        times.append(free - at)
    return times


def first_arrivals(rate: float, count: int) -> list[float]:
    return list(itertools.islice(poisson(SEED, rate), count))


@pytest.mark.parametrize(("load", "closed_form"), [(0.5, 1.5), (0.8, 3.0)])
def test_one_engine_is_the_queue_m_d_1(load, closed_form):
    """`D + R·D²/(2(1 - R·D))` with D = 1: the simulation is Lindley's recursion on the same
    arrivals, and the recursion has the closed form's mean within three standard errors."""
    outcome = run_experiment(experiment("data_parallel", [served_in(1.0)], load, 600, seed=SEED))
    times = lindley(first_arrivals(load, 600), 1.0)
    assert [record.first_token_s for record in outcome.records] == pytest.approx(times, abs=1e-6)
    assert max(times) > 3  # it did queue

    long = lindley(first_arrivals(load, 100_000), 1.0)
    means = [fmean(long[begin : begin + 1000]) for begin in range(0, len(long), 1000)]
    error = stdev(means) / len(means) ** 0.5
    assert abs(fmean(means) - closed_form) < 3 * error < 0.2


def test_the_fitted_model_is_the_same_queue():
    step = FittedLatency(prefill=(400.0, 5.0, 0.0), decode=(1, 1, 1), large_decode=(1, 1, 1))
    seconds = 0.4 + PROMPT * 0.005
    fleet = [engine("engine-0", step)]
    outcome = run_experiment(experiment("data_parallel", fleet, 0.9, 300, seed=SEED))
    expected = lindley(first_arrivals(0.9, 300), seconds)
    assert [record.end_s for record in outcome.records] == pytest.approx(expected, abs=1e-6)


def test_utilisation_is_work_over_time():
    outcome = run_experiment(experiment("data_parallel", [served_in(0.5)], 1.2, 200, seed=SEED))
    assert outcome.engines[0].busy_s == pytest.approx(200 * 0.5)
    assert outcome.engines[0].utilisation == pytest.approx(200 * 0.5 / outcome.seconds)
    assert outcome.seconds == max(record.at_s + record.end_s for record in outcome.records)


def test_round_robin_over_two_engines_is_two_queues():
    """Each engine gets every other request."""
    fleet = [served_in(1.0, f"engine-{i}") for i in range(2)]
    outcome = run_experiment(experiment("data_parallel", fleet, 1.5, 400, seed=SEED))
    arrivals, times = first_arrivals(1.5, 400), [0.0] * 400
    for half in range(2):
        times[half::2] = lindley(arrivals[half::2], 1.0)
    assert [record.end_s for record in outcome.records] == pytest.approx(times, abs=1e-6)


@pytest.mark.parametrize("strategy", ["data_parallel", "prefill_decode", "balanced", "replicate"])
def test_littles_law_holds_and_nothing_is_left(strategy):
    """`run_experiment` itself checks Little's law, that no engine is busy, and every page."""
    fleet = [
        engine("prefill-0", STEP, role="prefill"), engine("prefill-1", STEP, role="prefill"),
        engine("decode-0", STEP, role="decode"),
    ]  # fmt: skip
    outcome = run_experiment(experiment(strategy, fleet, 20.0, 120, output=30, call_s=1e-3))
    records = outcome.records
    assert all(record.ok and record.output_tokens == 30 for record in records)
    spent = sum(record.end_s for record in records)
    assert outcome.in_system * outcome.seconds == pytest.approx(spent) and outcome.in_system > 1
    assert sum(use.put_bytes for use in outcome.engines) > 0 or strategy == "data_parallel"
    assert all(0 < use.kv_mean <= use.kv_peak <= 1 for use in outcome.engines if use.steps)


def test_a_run_that_breaks_littles_law_is_an_error():
    outcome = Outcome([RequestRecord(0, 0.0, 1, 1, 1.0, 2.0)], [], 2.0, 0.9)
    with pytest.raises(Internal, match="in the system"):
        experiments_of._check_little(outcome)


def test_a_dead_engine_costs_retries_and_no_request():
    fleet = [engine(f"engine-{i}", STEP) for i in range(3)]
    options = {"output": 40, "call_s": 1e-3}
    whole = run_experiment(experiment("data_parallel", fleet, 30.0, 90, **options))
    outcome = run_experiment(
        experiment("data_parallel", fleet, 30.0, 90, deaths=[("engine-1", 1.5)], **options)
    )
    assert all(record.ok and record.output_tokens == 40 for record in outcome.records)
    hit = [record for record in outcome.records if record.retries]
    assert hit and all(record.at_s < 1.6 for record in hit)
    assert [use.died for use in outcome.engines] == [False, True, False]
    assert outcome.engines[1].busy_s < whole.engines[1].busy_s
    before = [record for record in outcome.records if record.at_s + record.end_s < 1.5]
    assert before and before == [whole.records[record.number] for record in before]


def test_without_engines_requests_fail():
    fleet = [engine("engine-0", STEP)]
    outcome = run_experiment(
        experiment("data_parallel", fleet, 10.0, 40, output=5, deaths=[("engine-0", 2.0)])
    )
    failed = [record for record in outcome.records if not record.ok]
    assert failed and all(record.error.startswith("no_engines") for record in failed)
    assert all(record.at_s + record.end_s > 2.0 for record in failed)


def test_an_engine_that_does_not_exist_cannot_die():
    with pytest.raises(BadRequest, match="no engine 'x' can die; there are engine-0"):
        run_experiment(experiment("data_parallel", [served_in(1.0)], 1.0, 1, deaths=[("x", 1.0)]))


WRONG = {
    "hangs": ("    await asyncio.Event().wait()\n    yield Chunk()\n", "made no progress for"),
    "raises": ("    1 / 0\n    yield Chunk()\n", "ZeroDivisionError"),
    "ends early": ("    return\n    yield Chunk()\n", "ended before the stream did"),
    "leaves a task": (
        "    async for chunk in engine.start_generate(request):\n        yield chunk\n"
        "    asyncio.create_task(asyncio.sleep(1e6))\n", "leaves 1 task behind",
    ),
}  # fmt: skip


TAIL = "    async for chunk in engine.start_generate(request):\n        yield chunk\n"
OVERLAPS = {
    "left open": (
        "    async for chunk in engine.start_generate(request):\n        break\n" + TAIL,
        "calls start_generate on engine engine-0 while its earlier start_generate there has not "
        "ended (mine.py:9)",
    ),
    "ended early": (
        "    stream = engine.start_generate(request)\n    async for chunk in stream:\n"
        "        break\n    await stream.aclose()\n" + TAIL,
        "calls start_generate on engine engine-0 after it has ended its earlier start_generate "
        "there early (mine.py:11)",
    ),
    "two leases": (
        "    async with engine.prep_recv(request, end=-1), engine.prep_recv(request, end=-1):\n"
        "        yield Chunk()\n",
        "calls prep_recv on engine engine-0 while its earlier lease there is open (mine.py:7)",
    ),
    "a send that took too long": (
        "    import contextlib\n    first, other = cluster.engines\n"
        "    async with other.prep_recv(request, end=-1) as kv:\n"
        "        with contextlib.suppress(TimeoutError):\n"
        "            async with asyncio.timeout(0.05):\n"
        "                await first.remote_send(request, kv, begin=kv.match_len, end=-1)\n"
        "    async for chunk in first.start_generate(request):\n        yield chunk\n",
        "calls start_generate on engine engine-0 after it has ended its earlier remote_send there "
        "early (mine.py:13)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OVERLAPS)
def test_a_call_that_an_earlier_one_excludes_is_the_strategys_mistake(tmp_path, mistake):
    body, said = OVERLAPS[mistake]
    fleet = [served_in(0.1, f"engine-{number}") for number in range(2)]
    with pytest.raises(BadRequest) as caught:
        run_experiment(experiment(strategy_file(tmp_path, body), fleet, 1.0, 1, output=5))
    assert caught.value.message == f"strategy mine {said}"


@pytest.mark.parametrize("mistake", WRONG)
def test_a_strategys_own_mistake_ends_the_run_and_names_it(tmp_path, mistake):
    body, said = WRONG[mistake]
    file = strategy_file(tmp_path, body)
    with pytest.raises(BadRequest) as caught:
        run_experiment(experiment(file, [served_in(0.1)], 1.0, 5))
    assert caught.value.message.startswith("strategy mine")
    assert said in caught.value.message and "\n" not in caught.value.message


def test_texts_are_refused(tmp_path):
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text('{"prompt": "hello", "max_tokens": 3}\n')
    one = experiment("data_parallel", [served_in(1.0)], 1.0, 1)
    workload = type(one.workload)(name=str(bodies), rate=1.0)
    refused = type(one)(one.bound, one.fleet, workload, 1)
    with pytest.raises(BadRequest, match="request 0 of the workload is a text"):
        run_experiment(refused)


def test_a_strategy_that_draws_is_reproducible_and_leaves_the_state_of_random(tmp_path):
    file = strategy_file(
        tmp_path,
        "    import random\n    await asyncio.sleep(random.random())\n"
        "    async for chunk in engine.start_generate(request):\n        yield chunk\n",
    )
    state = random.getstate()
    outcomes = [run_experiment(experiment(file, [served_in(0.1)], 3.0, 20)) for _ in range(2)]
    assert outcomes[0] == outcomes[1] and random.getstate() == state
    assert len({record.end_s for record in outcomes[0].records}) > 15


def test_calls_take_time():
    """Half on the way to the engine, half on the way back; the engine's 10 ms pass meanwhile."""
    fleet = [engine("engine-0", FixedLatency(10.0))]
    outcome = run_experiment(experiment("data_parallel", fleet, 0.1, 3, call_s=0.5))
    assert [record.first_token_s for record in outcome.records] == pytest.approx([0.5] * 3)


SPINS = {
    "sleeps for no time": "    while True:\n        await asyncio.sleep(0)\n    yield\n",
    "has itself called back": (
        "    loop = asyncio.get_running_loop()\n"
        "    def again():\n        loop.call_later(1e-15, again)\n    again()\n"
        "    async for chunk in engine.start_generate(request):\n        yield chunk\n"
    ),
}


@pytest.mark.parametrize("body", SPINS.values(), ids=SPINS)
def test_a_strategy_that_lets_no_time_pass_ends_the_run(tmp_path, body, monkeypatch):
    monkeypatch.setattr(loop, "MOST_ROUNDS", 5000)
    mine = strategy_file(tmp_path, body)
    with pytest.raises(BadRequest, match=r"no time passes .* strategy mine.* without ever waiting"):
        run_experiment(experiment(mine, [served_in(1.0)], 1.0, 3))


def test_a_strategy_that_cancels_the_run_is_named(tmp_path):
    body = (
        "    for task in asyncio.all_tasks():\n        task.cancel()\n    await asyncio.sleep(1)\n"
    )
    mine = strategy_file(tmp_path, body + "    yield\n")
    with pytest.raises(BadRequest, match="mine has cancelled tasks that are not its own"):
        run_experiment(experiment(mine, [served_in(1.0)], 1.0, 3))


def test_what_takes_longer_than_the_clock_is_exact_is_refused():
    """Beyond 2**24 s asyncio's resolution is lost in rounding, and timers would never be due."""
    with pytest.raises(BadRequest, match=r"arrives .* s after the start: .* 8e\+06 s"):
        run_experiment(experiment("data_parallel", [served_in(1.0)], 1e-9, 3))


def test_steps_too_short_for_a_float_are_skipped_over_all_the_same():
    fleet = [engine("engine-0", FixedLatency(1e-300))]
    outcome = run_experiment(experiment("data_parallel", fleet, 10.0, 5, output=50))
    assert [record.output_tokens for record in outcome.records] == [50] * 5
