"""The latency models give the published numbers, and pay for chunks what they pay for the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from pydantic import ValidationError

from engine.latency import FittedLatency, FixedLatency, PutLatency, StepWork

# DistServe's public coefficients for an A100-80G (Apache-2.0), by model and tensor parallelism:
# github.com/LLMServe/DistServe, simdistserve/estimators/profile_data.
PREFILL = {
    ("13b", 1): (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    ("13b", 2): (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
    ("13b", 4): (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
    ("66b", 2): (43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
    ("66b", 4): (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
}
DECODE = (19.934702624895458, 0.0006269356524350583, 0.03850697740828398)
LARGE_DECODE = (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046)
OPT_13B = FittedLatency(PREFILL["13b", 1], DECODE, LARGE_DECODE, stage_ms=1)


def prompt(tokens: int, *, start: int = 0) -> StepWork:
    return StepWork(tokens, (start + tokens) ** 2 - start**2)


@pytest.mark.parametrize(
    ("model", "tp", "pp", "milliseconds"),
    [
        ("13b", 1, 1, 73.149),
        ("13b", 2, 1, 51.497),
        ("13b", 4, 1, 32.697),
        ("66b", 2, 1, 190.357),
        ("66b", 4, 1, 110.114),
        ("66b", 2, 2, 96.678),
    ],
)
def test_the_published_prefills_of_512_tokens(model: str, tp: int, pp: int, milliseconds: float):
    latency = replace(OPT_13B, prefill=PREFILL[model, tp], pp=pp)
    assert latency.seconds(prompt(512)) * 1e3 == pytest.approx(milliseconds, abs=5e-4)


@pytest.mark.parametrize(
    ("batch", "milliseconds"),
    [(1, 20.134), (64, 32.671), (94, 38.641), (95, 36.306), (128, 46.429)],
)
def test_the_published_decodes_with_256_tokens_before_each(batch: int, milliseconds: float):
    """The published context is that of one sequence. The model takes the sum over the batch."""
    work = StepWork(decodes=batch, context=256 * batch)
    assert OPT_13B.seconds(work) * 1e3 == pytest.approx(milliseconds, abs=5e-4)


def test_padding_costs_as_much_as_prompts_or_without_them_as_decodes():
    padded = FittedLatency((20.0, 0.5, 0.0), (10.0, 0.0, 1.0), (10.0, 0.0, 1.0), row_multiple=16)
    assert padded.seconds(StepWork(5, 25)) * 1e3 == pytest.approx(20 + 0.5 * 16)
    assert padded.seconds(StepWork(decodes=5)) * 1e3 == pytest.approx(10 + 16)
    assert padded.seconds(StepWork(12, 144, 5, 50)) * 1e3 == pytest.approx(20 + 0.5 * 27 + 5)
    assert padded.seconds(StepWork()) == 0.0


def test_a_step_with_prompts_and_decodes_pays_the_larger_constant_once():
    prompts, decodes = prompt(512), StepWork(decodes=64, context=64 * 256)
    both = StepWork(512, 512**2, 64, 64 * 256)
    apart = OPT_13B.seconds(prompts) + OPT_13B.seconds(decodes)
    assert OPT_13B.seconds(both) == pytest.approx(apart - PREFILL["13b", 1][0] / 1e3)


def test_chunks_pay_for_a_prompts_attention_as_much_as_the_whole():
    latency = replace(OPT_13B, prefill=(0.0, 0.1, 1e-4), stage_ms=0)
    chunks = [prompt(1000), prompt(300, start=1000), prompt(1700, start=1300)]
    assert sum(map(latency.seconds, chunks)) == pytest.approx(latency.seconds(prompt(3000)))
    assert latency.seconds(chunks[2]) > latency.seconds(prompt(1700))


def test_stages_divide_the_time_and_each_adds_to_steps_with_prompts():
    two = replace(OPT_13B, pp=2)
    decodes = StepWork(decodes=8, context=800)
    assert two.seconds(decodes) == pytest.approx(OPT_13B.seconds(decodes) / 2)
    assert two.seconds(prompt(100)) == pytest.approx(
        (OPT_13B.seconds(prompt(100)) - 1e-3) / 2 + 2e-3
    )


def test_a_step_that_computes_nothing_takes_no_time():
    for latency in (OPT_13B, FixedLatency(5.0, 2.0)):
        assert latency.seconds(StepWork()) == 0


@pytest.mark.parametrize(
    ("work", "milliseconds"),
    [(StepWork(decodes=9, context=999), 5), (prompt(100), 30), (StepWork(100, 100**2, 9, 9), 30)],
)
def test_the_mocks_pace(work: StepWork, milliseconds: float):
    assert FixedLatency(5.0, 4.0).seconds(work) * 1e3 == pytest.approx(milliseconds)
    assert FixedLatency(5.0).seconds(work) * 1e3 == pytest.approx(5)  # prompts take no time of own


@pytest.mark.parametrize(
    "bad",
    [
        lambda: replace(OPT_13B, prefill=(1.0, -0.1, 0.0)),
        lambda: replace(OPT_13B, decode=(1.0, float("nan"), 0.0)),
        lambda: replace(OPT_13B, pp=0),
        lambda: FixedLatency(float("inf")),
        lambda: PutLatency(0.0),
        lambda: PutLatency(1e9, -1.0),
    ],
)
def test_what_would_let_time_run_backwards_is_refused(bad):
    with pytest.raises(ValidationError):
        bad()


def test_a_put_pays_for_its_bytes_and_its_layers():
    link = PutLatency(bandwidth=24.5e9, layer_s=29.8e-6)
    assert link.seconds(4096 * 3000) == pytest.approx(0.533e-3, rel=0.01)  # Table 3, one layer
    assert link.seconds(32 * 4096 * 3000, 32) == pytest.approx(32 * link.seconds(4096 * 3000))


def test_more_work_takes_more_time_but_for_the_published_threshold():
    """DistServe's two sets of coefficients meet at 95 decodes, and 95 take less than 94."""
    ramp = [StepWork(decodes=count, context=256 * count) for count in range(1, 257)]
    falls = [
        work.decodes
        for before, work in pairwise(ramp)
        if OPT_13B.seconds(work) <= OPT_13B.seconds(before)
    ]
    assert falls == [95]
