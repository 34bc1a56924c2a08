"""Tables follow their points, and are made of measured steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from engine.latency import FittedLatency, Measured, StepWork, TableLatency, tabulate_latency
from engine.latency.table import interpolate
from engine.protocol import BadRequest

TABLE = TableLatency(
    rows=((1, 10.0), (128, 12.0), (256, 20.0), (1024, 80.0)),
    sequences=((1, 0.0), (64, 3.0)),
    square_ms=1e-6,
    context_ms=1e-4,
    mixed_ms=3e-4,
)
LENGTHS = (1, 128, 256, 1024)
BATCHES = (1, 16, 64)


def prompt(count: int, start: int = 0) -> StepWork:
    return StepWork(count, (start + count) ** 2 - start**2)


def ms(work: StepWork) -> float:
    return TABLE.seconds(work) * 1e3


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 5), (10, 5), (15, 7.5), (20, 10), (60, 10), (100, 10), (140, 14), (300, 30)],
)
def test_interpolation_between_before_and_after_the_points(count: int, expected: float):
    points = ((10, 5.0), (20, 10.0), (100, 10.0), (120, 12.0))
    assert interpolate(points, count) == pytest.approx(expected)
    assert interpolate(((7, 3.0),), count) == 3.0


def test_prompts_and_what_stands_before_them():
    assert ms(prompt(256)) == pytest.approx(20)
    assert ms(prompt(256, start=1000)) == pytest.approx(20 + 1e-6 * 2 * 1000 * 256)
    several = StepWork(256, 4 * 64**2)  # four prompts count as one of their length
    assert ms(several) == pytest.approx(20)


def test_decodes_alone_and_beside_prompts():
    assert ms(StepWork(decodes=64, context=6400)) == pytest.approx(10 + 2 * 63 / 127 + 3 + 0.64)
    both = StepWork(192, 192**2, 64, 6400)
    assert ms(both) == pytest.approx(20 + 3 + 6400 * (1e-4 + 3e-4))
    assert ms(StepWork()) == 0


def test_rows_are_padded_as_the_engine_pads_them():
    padded = replace(TABLE, row_multiple=64)
    assert padded.seconds(prompt(129)) == TABLE.seconds(prompt(192))
    assert padded.seconds(prompt(192)) == TABLE.seconds(prompt(192))


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (((1, 2.0), (1, 3.0)), "from 1 to 1"),
        (((2, 2.0), (1, 3.0)), "from 2 to 1"),
        (((1, 2.0), (2, 1.9)), "from 1 to 2, a table's counts rise and its times do not fall"),
        ((), "at least 1 item"),
        (((0, 1.0),), "greater than or equal to 1"),
        (((1, -1.0),), "greater than or equal to 0"),
    ],
)
def test_points_that_fall_are_refused(points, says: str):
    with pytest.raises(ValidationError, match=says):
        TableLatency(rows=points, sequences=((1, 0.0),))


def measure(noise: float = 0.0, repeats: int = 1) -> tuple[list[Measured], list[Measured]]:
    """Return measured steps of `TABLE` with prompts or decodes, and with both."""
    random = np.random.default_rng(7)
    apart = [prompt(count, start) for count in LENGTHS for start in (0, 1000, 8000)]
    apart += [StepWork(decodes=b, context=b * each) for b in BATCHES for each in (100, 1000, 9000)]
    mixed = [StepWork(64, 64**2, b, b * each) for b in BATCHES for each in (100, 1000)]

    def times(works: list[StepWork]) -> list[Measured]:
        return [
            Measured(work, TABLE.seconds(work) * float(1 + noise * random.standard_normal()))
            for work in works * repeats
        ]

    return times(apart), times(mixed)


def test_exact_steps_give_the_table_back():
    made, fit = tabulate_latency(*measure())
    assert [count for count, _ in made.rows] == list(LENGTHS)
    assert [count for count, _ in made.sequences] == list(BATCHES)
    for work in (prompt(700), prompt(64, 5000), StepWork(64, 64**2, 40, 4000)):
        assert made.seconds(work) == pytest.approx(TABLE.seconds(work), rel=1e-3)
    assert made.square_ms == pytest.approx(TABLE.square_ms)
    assert made.context_ms == pytest.approx(TABLE.context_ms, rel=0.02)
    assert (fit.prefill.points, fit.decode.points) == (12, 9)
    assert fit.prefill.largest < 1e-9 and fit.decode.largest < 0.02


def test_noisy_steps_give_it_within_the_noise():
    made, fit = tabulate_latency(*measure(0.02, repeats=40))
    for work in (prompt(256), prompt(1024, 8000), StepWork(decodes=64, context=64_000)):
        assert made.seconds(work) == pytest.approx(TABLE.seconds(work), rel=0.02)
    assert made.mixed_ms == pytest.approx(TABLE.mixed_ms, rel=0.1)
    assert 0.01 < fit.prefill.median < 0.02 and 0.01 < fit.decode.median < 0.02


def test_a_given_square_is_kept_and_without_chunks_it_is_none():
    apart, mixed = measure()
    assert tabulate_latency(apart, mixed, square_ms=5.0)[0].square_ms == 5
    whole = [s for s in apart if s.work.prompt_squares <= s.work.prompt_tokens**2]
    assert tabulate_latency(whole)[0].square_ms == 0
    assert tabulate_latency(whole)[0].mixed_ms == 0


def test_times_that_fall_are_pooled():
    apart = [step for step in measure()[0] if step.work.decodes]
    prompts = [(16, 12.0), (32, 14.0), (64, 10.0), (128, 13.0), (256, 30.0)]
    made, fit = tabulate_latency([*apart, *(Measured(prompt(n), t / 1e3) for n, t in prompts)])
    assert made.rows[1:] == ((16, 12.0), (32, 12.0), (64, 12.0), (128, 13.0), (256, 30.0))
    assert made.rows[0] == (1, pytest.approx(10))  # the shortest prompt is a decode
    assert fit.prefill.largest == pytest.approx(0.2)


def test_a_slow_decode_does_not_lift_the_prompts():
    decodes = [Measured(StepWork(0, 0, b, c), 1.0) for b, c in ((1, 1), (1, 9), (2, 9))]
    made, _ = tabulate_latency([*decodes, Measured(prompt(100), 0.5)])
    assert made.rows == ((1, 500.0), (100, 500.0))


def test_several_prompts_decide_only_where_no_single_one_does():
    decodes = [step for step in measure()[0] if step.work.decodes]
    single = [Measured(prompt(count), 0.05) for count in (128, 256)]
    several = [Measured(StepWork(4 * n, 4 * n * n), 0.09) for n in (64, 128)]  # 256 and 512
    rows = dict(tabulate_latency([*decodes, *single, *several])[0].rows)
    assert rows[256] == pytest.approx(50) and rows[512] == pytest.approx(90)


def test_steps_that_make_no_table_are_refused():
    decodes = [step for step in measure()[0] if step.work.decodes]
    with pytest.raises(BadRequest, match="no step was measured that starts at its prompts' begin"):
        tabulate_latency(decodes)
    with pytest.raises(BadRequest, match="no step was measured that starts at its prompts' begin"):
        tabulate_latency([*decodes, Measured(prompt(8, start=8), 1.0)])
    with pytest.raises(BadRequest, match="decode: 0 measured steps"):
        tabulate_latency([Measured(prompt(8), 1.0)])
    with pytest.raises(BadRequest, match="either prompts or decodes"):
        tabulate_latency(measure()[1])


def test_a_table_follows_what_the_formula_cannot():
    """Steps in the times, as tiles of a matrix product make them."""
    steps = [Measured(prompt(n), 0.01 * (1 + n // 256)) for n in range(16, 1024, 16)]
    decodes = [Measured(StepWork(0, 0, b, b * c), 0.01) for b in (1, 2, 4) for c in (1, 9, 99)]
    _, fit = tabulate_latency(steps + decodes)
    assert fit.prefill.largest < 1e-9
    formula = FittedLatency((10.0, 10 / 256, 0.0), (10.0, 0.0, 0.0), (10.0, 0.0, 0.0))
    assert max(abs(formula.seconds(s.work) / s.seconds - 1) for s in steps) > 0.1
