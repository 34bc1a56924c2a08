"""Each shipped profile loads, says where it is from, and takes longer for more work."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

import engine.latency
from engine.latency import (
    DEVICES,
    MODELS,
    StepWork,
    find_profile,
    pool_tokens,
    profile_names,
    read_profile,
)
from engine.protocol import BadRequest

NAMES = profile_names()
FOLDER = Path(engine.latency.__file__).parent / "profiles"


def test_there_are_those_that_the_documents_name():
    assert {"llama-3.1-8b@a100", "opt-13b@a100", "opt-66b@a100:tp4", "smollm2@cpu"} <= set(NAMES)
    assert len(NAMES) == 23 == len(list(FOLDER.iterdir()))


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_agrees_with_its_name_model_and_device(name: str):
    profile = find_profile(name)
    model, _, rest = name.partition("@")
    device, _, degree = rest.replace(":dp", ":tp").partition(":tp")
    assert (profile.name, profile.model) == (name, model)
    assert profile.device.startswith(device)
    assert len(profile.source) > 40
    assert read_profile(FOLDER / f"{name.replace(':', '_')}.json") == profile
    if device == "cpu":
        assert profile.gpus == 0 and profile.fit is not None
        return
    assert profile.gpus == int(degree or 1)
    shape = MODELS[model]
    assert (profile.layers, profile.context_length) == (shape.layers, shape.context_length)
    assert profile.kv_bytes_per_token == shape.kv_bytes_per_token
    fits = pool_tokens(shape, DEVICES[profile.device], tp=profile.gpus)
    assert fits / 2 < profile.pool_tokens <= fits


def falls(profile: engine.latency.Profile, ramp: Iterable[StepWork]) -> list[StepWork]:
    """Return the steps that take less time than those before them."""
    seconds = profile.step.seconds
    return [more for less, more in pairwise(ramp) if seconds(more) < seconds(less)]


def chunk(count: int, start: int, decodes: int = 0, context: int = 0) -> StepWork:
    return StepWork(count, (start + count) ** 2 - start**2, decodes, context)


@pytest.mark.parametrize("name", NAMES)
def test_more_work_never_takes_less_time(name: str):
    """But from 94 to 95 decodes: there, DistServe's second set of coefficients begins."""
    profile = find_profile(name)
    for start in (0, 3000):
        assert not falls(profile, [chunk(n, start) for n in range(1, 9000, 7)])
        assert not falls(profile, [chunk(n, start, 8, 800) for n in range(9000)])
    assert not falls(profile, [chunk(512, start) for start in range(0, 9000, 50)])
    assert not falls(profile, [StepWork(0, 0, 8, each) for each in range(0, 80_000, 100)])
    decodes = falls(profile, [StepWork(0, 0, n, 500 * n) for n in range(1, 300)])
    assert {step.decodes for step in decodes} <= ({95} if name.startswith("opt-") else set())
    beside = falls(profile, [chunk(512, 0, n, 500 * n) for n in range(300)])
    assert {step.decodes for step in beside} <= ({95} if name.startswith("opt-") else set())


def test_the_threshold_is_the_only_fall_and_is_there():
    profile = find_profile("opt-13b@a100")
    decodes = falls(profile, [StepWork(0, 0, n, 256 * n) for n in range(1, 300)])
    assert [step.decodes for step in decodes] == [95]


@pytest.mark.parametrize("name", NAMES)
def test_the_residuals_are_those_that_were_published(name: str):
    """DistServe publishes no points. All other models are near theirs, at least in the median."""
    fit = find_profile(name).fit
    if name.startswith("opt-"):
        assert fit is None
    else:
        assert fit is not None and fit.prefill.points >= 4
        assert fit.prefill.median < 0.05 and fit.prefill.largest < 0.5
        # Of a pair, decodes have two devices and a prompt has one: the table mixes the two.
        assert fit.decode.median < 0.05
        assert fit.decode.largest < (0.25 if name.endswith(":dp2") else 0.15)


def test_llama_on_an_a100_is_the_papers():
    """Table 3 of the microserving paper, and what it says of decodes and of migration."""
    profile = find_profile("llama-3.1-8b@a100")
    seconds = profile.step.seconds
    for start, layer_ms, put_ms in (
        (500, 1.247, 0.197),
        (2500, 1.391, 0.533),
        (4500, 1.564, 0.867),
    ):
        assert seconds(chunk(500, start)) * 1e3 / 32 == pytest.approx(layer_ms, rel=0.01)
        put = profile.put.seconds((start + 500) * profile.kv_bytes_per_token, 32)
        assert put * 1e3 / 32 == pytest.approx(put_ms, rel=0.01)
    assert seconds(chunk(1000, 0)) / seconds(chunk(500, 500)) == pytest.approx(1.7, abs=0.02)
    decoding = sum(seconds(StepWork(0, 0, 1, 3000 + n)) for n in range(100))
    assert decoding > 1.0
    assert 4 < decoding / seconds(chunk(3000, 0)) < 6


@pytest.mark.parametrize(
    ("tokens", "put_ms", "percent"), [(1000, 0.197, 15.8), (3000, 0.533, 38.3), (5000, 0.867, 55.4)]
)
def test_the_share_of_a_put_in_a_layer_of_microserving_table_3(
    tokens: int, put_ms: float, percent: float
):
    """500 tokens are computed, and all are put: `T_KV = 0.0298 ms + n · 0.1675 µs` per layer."""
    profile = find_profile("llama-3.1-8b@a100")
    per_layer = profile.kv_bytes_per_token // 32
    assert per_layer == 4096
    put = profile.put.seconds(tokens * per_layer)
    assert put * 1e3 == pytest.approx(0.0298 + tokens * 0.1675e-3, rel=5e-3)
    assert put * 1e3 == pytest.approx(put_ms, rel=5e-3)
    layer = profile.step.seconds(chunk(500, tokens - 500)) / 32
    assert 100 * put / layer == pytest.approx(percent, abs=0.5)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BadRequest) as refused:
        find_profile("gpt-5@moon")
    assert refused.value.message.startswith("no profile is called 'gpt-5@moon'; there are bloom-")
    assert all(name in refused.value.message for name in NAMES)
    for name in ("", "../profiles/opt-13b@a100", "opt-13b@a100_tp2"):
        with pytest.raises(BadRequest, match="no profile is called"):
            find_profile(name)
