"""The fitter finds the coefficients that measured steps were made from."""

from __future__ import annotations

import numpy as np
import pytest

from engine.latency import Fit, FittedLatency, Measured, Residuals, StepWork, doubt, fit_latency
from engine.protocol import BadRequest

TRUE = FittedLatency((18.0, 0.1, 7e-6), (20.0, 6e-4, 0.04), (7.0, 6e-4, 0.16), 95)
PROMPTS = [StepWork(count, count**2) for count in (16, 64, 128, 256, 512, 1024, 2048, 4096)]
DECODES = [
    StepWork(decodes=batch, context=batch * context)
    for batch in (1, 4, 16, 48, 94, 95, 128, 192, 256)
    for context in (64, 256, 1024)
]


def measure(latency: FittedLatency, noise: float, repeats: int = 1) -> list[Measured]:
    """Measure each step with a relative error of standard deviation `noise`."""
    random = np.random.default_rng(7)
    return [
        Measured(work, latency.seconds(work) * float(1 + noise * random.standard_normal()))
        for work in (PROMPTS + DECODES) * repeats
    ]


def test_exact_steps_give_the_coefficients_back():
    fitted, fit = fit_latency(measure(TRUE, 0.0), large_batch=95)
    for name in ("prefill", "decode", "large_decode"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert fitted.large_batch == 95
    assert (fit.prefill.points, fit.decode.points) == (8, 27)
    assert fit.prefill.largest < 1e-9 and fit.decode.largest < 1e-9


def test_noisy_steps_give_them_within_the_noise():
    fitted, fit = fit_latency(measure(TRUE, 0.02, repeats=50), large_batch=95)
    assert fitted.prefill == pytest.approx(TRUE.prefill, rel=0.03)
    assert fitted.decode == pytest.approx(TRUE.decode, rel=0.03)
    assert fitted.large_decode == pytest.approx(TRUE.large_decode, rel=0.1)
    for residuals in (fit.prefill, fit.decode):
        assert 0.01 < residuals.median < 0.02 < residuals.largest < 0.1


def test_errors_count_in_relation_to_the_time():
    """One slow step that is off by a tenth moves a short step's model by less than a tenth."""
    measured = measure(TRUE, 0.0)
    slowest = max(range(len(PROMPTS)), key=lambda index: measured[index].seconds)
    work, seconds = measured[slowest]
    measured[slowest] = Measured(work, seconds * 1.1)
    fitted, _ = fit_latency(measured)
    for work in PROMPTS[:4]:
        assert fitted.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)


def test_without_a_threshold_all_batches_have_the_same_coefficients():
    fitted, fit = fit_latency(measure(TRUE, 0.0))
    assert fitted.decode == fitted.large_decode
    assert fit.decode.largest > 0.05  # one line does not fit both halves


def test_no_coefficient_is_negative():
    """Prefill times that bend down would give a negative square without the bound."""
    prompts = [Measured(StepWork(n, n * n), 0.01 + n**0.5 * 1e-3) for n in range(100, 4000, 300)]
    decodes = [step for step in measure(TRUE, 0.0) if step.work.decodes]
    fitted, fit = fit_latency(prompts + decodes)
    assert fitted.prefill[2] == 0 and min(fitted.prefill[:2]) > 0
    assert 0 < fit.prefill.largest < 0.3


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (PROMPTS, "decode: 0 measured steps do not tell 3 coefficients apart"),
        (DECODES, "prefill: 0 measured steps"),
        (PROMPTS[:2] + DECODES, "prefill: 2 measured steps"),
        (PROMPTS[:1] * 9 + DECODES, "prefill: 9 measured steps"),
        (PROMPTS + DECODES[:3], "decode: 3 measured steps"),
        ([StepWork(8, 64, 1, 8)], "either prompts or decodes"),
        ([StepWork()], "either prompts or decodes"),
    ],
)
def test_steps_that_decide_nothing_are_refused(steps: list[StepWork], says: str):
    with pytest.raises(BadRequest, match=says):
        fit_latency([Measured(work, TRUE.seconds(work) or 1.0) for work in steps])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float):
    with pytest.raises(BadRequest, match="no positive time"):
        fit_latency([*measure(TRUE, 0.0), Measured(PROMPTS[0], seconds)])


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (0.02, 0.1, None),
        (0.02, 0.15, "half of the decodes are more than 15% off (up to 41%)"),
        (0.3, 0.02, "half of the prompts are more than 30% off (up to 41%)"),
    ],
)
def test_a_bad_fit_is_doubted_by_its_median(prefill, decode, said):
    fit = Fit(Residuals(9, prefill, 0.41), Residuals(9, decode, 0.41))
    assert (said in doubt(fit)) if said else doubt(fit) == ""
