"""Fits to steps under traffic: with prompts, decodes or both, and with disturbances."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.latency import (
    FittedLatency,
    FixedLatency,
    Measured,
    StepWork,
    TableLatency,
    fit_observed,
    fit_put,
)
from engine.latency.fit_table import fit_table
from engine.protocol import BadRequest

TRUE = FittedLatency((4.0, 0.3, 1e-4), (6.0, 2e-3, 0.5), (6.0, 2e-3, 0.5), large_batch=1)

# Of a small model on a CPU: a few rows cost next to nothing beside reading the weights.
KINKED = TableLatency(
    ((1, 15.0), (4, 16.0), (16, 22.0), (32, 32.0), (128, 80.0), (512, 300.0)),
    ((1, 0.2), (2, 0.4)),
    square_ms=5e-5,
    context_ms=2e-3,
)


def steps(count: int, kinds: tuple[str, ...] = ("prompt", "decode", "both")) -> list[StepWork]:
    source, made = random.Random(7), []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        prompt = square = decodes = context = 0
        if kind != "decode":
            prompt, start = source.randrange(8, 512), source.choice((0, 0, 512, 1024))
            square = (start + prompt) ** 2 - start**2
        if kind != "prompt":
            decodes = source.randrange(1, 32)
            context = decodes * source.randrange(10, 2000)
        made.append(StepWork(prompt, square, decodes, context))
    return made


def timed(model, work: list[StepWork], noise: float = 0.0) -> list[Measured]:
    source = random.Random(8)
    return [Measured(w, model.seconds(w) * source.uniform(1 - noise, 1 + noise)) for w in work]


@pytest.mark.parametrize("kinds", [("prompt", "decode", "both"), ("prompt", "decode"), ("both",)])
def test_exact_steps_give_the_model_back(kinds: tuple[str, ...]):
    model, fit = fit_observed(timed(TRUE, steps(120, kinds)))
    unseen = steps(300, kinds)[120:]
    assert max(abs(model.seconds(w) / TRUE.seconds(w) - 1) for w in unseen) < 0.03
    assert fit.prefill.largest < 0.03 and fit.decode.largest < 0.03
    assert fit.prefill.points == sum(w.prompt_tokens > 0 for w in steps(120, kinds))


def test_padded_steps_give_the_model_back_if_the_padding_is_known():
    padded = replace(TRUE, row_multiple=1)
    measured = timed(padded, steps(240))
    model, _ = fit_observed(measured[:200], 1)
    unknowing, _ = fit_observed(measured[:200])
    assert max(abs(model.seconds(w) / seconds - 1) for w, seconds in measured[200:]) < 0.03
    assert max(abs(unknowing.seconds(w) / seconds - 1) for w, seconds in measured[200:]) > 0.06


def test_a_fixed_pace_is_fitted_without_terms_that_it_has_not():
    """Of the model `mock`: contexts and sequences cost nothing, so nothing is made up for them."""
    pace = FixedLatency(20.0, 50.0)
    model, _ = fit_observed(timed(pace, steps(90)))
    assert model.prefill == pytest.approx((20.0, 0.02, 0.0), rel=1e-6)
    assert model.decode == pytest.approx((20.0, 0.0, 0.0), rel=1e-6)


def test_noise_makes_up_no_terms():
    model, _ = fit_observed(timed(FixedLatency(20.0, 50.0), steps(300), noise=0.2))
    assert model.prefill[2] == model.decode[1] == model.decode[2] == 0.0
    assert model.prefill[:2] == pytest.approx((20.0, 0.02), rel=0.05)


def test_noise_averages_out():
    model, fit = fit_observed(timed(TRUE, steps(300), noise=0.2))
    unseen = steps(400)[300:]
    errors = sorted(abs(model.seconds(w) / TRUE.seconds(w) - 1) for w in unseen)
    assert errors[len(errors) // 2] < 0.05 and errors[-1] < 0.2
    assert 0.05 < fit.prefill.median < 0.15


def test_scattered_steps_are_fitted_by_their_mean():
    """As of a small model on a busy host, where steps differ by half for no reason that is told."""
    source, work = random.Random(9), steps(600)
    scattered = [Measured(w, TRUE.seconds(w) * source.lognormvariate(0.0, 0.5)) for w in work]
    model, _ = fit_observed(scattered)
    total = sum(seconds for _, seconds in scattered)
    assert 0.85 < sum(model.seconds(w) for w in work) / total < 1.1


def test_steps_in_which_the_process_stood_still_do_not_count():
    measured = timed(TRUE, steps(120))
    for at in range(0, 120, 10):
        measured[at] = measured[at]._replace(seconds=measured[at].seconds + 3.0)
    model, fit = fit_observed(measured)
    assert max(abs(model.seconds(w) / TRUE.seconds(w) - 1) for w in steps(120)) < 0.03
    assert fit.prefill.largest < 0.03


@pytest.mark.parametrize(
    ("work", "covered"),
    [
        ([], "none was"),
        (steps(60, ("decode",)), "none was"),
        (steps(60, ("prompt",)), "none was"),
        ([*steps(7, ("prompt",)), *steps(60, ("decode",))], "7 were"),
        ([*[StepWork(200, 40_000)] * 50, *steps(60, ("decode",))], "200 to 200 prompt tokens"),
        ([*steps(50, ("prompt",)), *[StepWork(0, 0, 3, 900)] * 50], "3 to 3 sequences that decode"),
    ],
)
def test_too_little_to_fit_says_what_was_covered(work: list[StepWork], covered: str):
    with pytest.raises(BadRequest, match=covered):
        fit_observed(timed(TRUE, work))


def test_puts_are_fitted_to_their_bytes():
    puts = [(size, 4 * 1e-4 + size / 2e9) for size in (1 << 16, 1 << 20, 1 << 24)]
    latency = fit_put(puts, 4)
    assert latency.bandwidth == pytest.approx(2e9) and latency.layer_s == pytest.approx(1e-4)
    with pytest.raises(BadRequest, match="no put"):
        fit_put([], 4)


def test_one_decode_alone_may_have_a_time_of_its_own():
    """As where one row is multiplied in another way than several."""
    fast = replace(TRUE, single_ms=1.5)
    work = [*steps(120), *(StepWork(decodes=1, context=100 + i) for i in range(12))]
    model, fit = fit_observed(timed(fast, work, noise=0.02))
    lone, two = StepWork(decodes=1, context=200), StepWork(decodes=2, context=400)
    for one in (lone, two, StepWork(64, 4096, 1, 200)):
        assert model.seconds(one) == pytest.approx(fast.seconds(one), rel=0.05)
    assert fit.decode.largest < 0.1


def of_traffic(count: int) -> list[StepWork]:
    """Whole prompts, decodes, and a few tokens of prompts beside decodes, as engines have them."""
    source, made = random.Random(3), []
    for _ in range(count):
        decodes = source.choice((0, 0, 1, 2, 3, 4, 6, 12))
        tokens = source.choice((192, 48, 500)) if not decodes else source.choice((0, 5, 12, 16, 50))
        start = source.choice((0, 64, 150))
        square = (start + tokens) ** 2 - start**2 if tokens else 0
        made.append(StepWork(tokens, square, decodes, 205 * decodes))
    return made


@pytest.mark.parametrize("multiple", [0, 8])
def test_where_one_price_per_token_does_not_fit_a_table_does(multiple: int):
    true = replace(KINKED, row_multiple=multiple)
    work = of_traffic(400)
    model, fit = fit_observed(timed(true, work, noise=0.05), multiple)
    assert isinstance(model, TableLatency) and model.row_multiple == multiple
    errors = sorted(abs(model.seconds(w) / true.seconds(w) - 1) for w in work)
    assert errors[len(errors) // 2] < 0.02 and errors[-1] < 0.08
    few = [w for w in work if w.decodes and 0 < w.prompt_tokens <= 16]
    assert abs(sum(map(model.seconds, few)) / sum(map(true.seconds, few)) - 1) < 0.02
    assert fit.prefill.median < 0.05


def test_a_table_that_is_hardly_nearer_than_the_formula_is_not_taken():
    model, _ = fit_observed(timed(TRUE, steps(90), noise=0.2))
    assert isinstance(model, FittedLatency)


def test_a_table_goes_on_beyond_what_was_measured():
    """Also where many steps have hardly more rows than a power of two, as chunks beside decodes."""
    source = random.Random(5)
    chunks = [
        StepWork(512, 512**2, n, 205 * n) for n in (source.randrange(1, 9) for _ in range(40))
    ]
    for work in (of_traffic(400), [*of_traffic(400), *chunks]):
        model = fit_table(timed(KINKED, work, noise=0.05))
        for tokens in (1024, 2048):
            further = StepWork(tokens, tokens**2)
            assert 0.93 < model.seconds(further) / KINKED.seconds(further) < 1.07


@pytest.mark.parametrize("held_up", [3.0, 30.0, 1000.0])
def test_a_lone_decode_that_was_held_up_changes_nothing(held_up: float):
    clean = [
        m._replace(seconds=0.1 * m.seconds)
        if m.work.decodes == 1 and not m.work.prompt_tokens
        else m
        for m in timed(KINKED, of_traffic(400), noise=0.02)
    ]
    measured = list(clean)
    at = next(n for n, m in enumerate(measured) if m.work.decodes == 1 and not m.work.prompt_tokens)
    measured[at] = measured[at]._replace(seconds=measured[at].seconds * held_up)
    model, _ = fit_observed(measured)
    undisturbed, _ = fit_observed(clean)
    assert isinstance(undisturbed, TableLatency)
    for decodes in (1, 2, 4):
        one = StepWork(decodes=decodes, context=205 * decodes)
        assert model.seconds(one) == pytest.approx(undisturbed.seconds(one), rel=0.02)


def test_steps_that_computed_nothing_do_not_count():
    """As an engine that lies may have them."""
    measured = timed(KINKED, of_traffic(400))
    empty = [Measured(StepWork(), 1.0), Measured(StepWork(context=7), 2.0)]
    assert fit_observed([*empty, *measured]) == fit_observed(measured)
    with pytest.raises(BadRequest, match="none was"):
        fit_observed(empty * 100)


@pytest.mark.parametrize("seconds", [1e-6, 3600.0])
def test_steps_of_any_size_are_fitted(seconds: float):
    """What an engine that lies may tell: the most that the protocol allows."""
    most = [StepWork(2**31, 2**62), StepWork(0, 0, 2**31, 2**31), StepWork(2**31, 0, 2**31, 0)]
    work = [*most, *steps(100)] * 3
    model, _ = fit_observed([Measured(w, seconds) for w in work])
    assert all(0 <= model.seconds(w) < 1e6 for w in work)
