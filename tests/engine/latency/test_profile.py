"""Profiles come back as they were written, and each damage to one gives a clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.latency import (
    Fit,
    FittedLatency,
    FixedLatency,
    Profile,
    PutLatency,
    Residuals,
    find_profile,
    read_profile,
    write_profile,
)
from engine.protocol import BadRequest

PROFILE = Profile(
    name="small@here",
    model="small",
    device="here",
    gpus=1,
    source="a test",
    layers=4,
    kv_bytes_per_token=4096,
    context_length=512,
    pool_tokens=4096,
    step=FittedLatency((1.5, 0.1, 1e-6), (2.0, 1e-3, 0.1), (1.0, 1e-3, 0.2)),
    put=PutLatency(1e9, 1e-5),
    fit=Fit(Residuals(10, 0.01, 0.05), Residuals(20, 0.02, 0.06)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def fields(path: Path) -> dict[str, Any]:
    write_profile(PROFILE, path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("step", [PROFILE.step, FixedLatency(5.0, 2.0)])
def test_a_profile_comes_back_as_it_was_written(path: Path, step):
    profile = Profile(**{**vars_of(PROFILE), "step": step})
    write_profile(profile, path)
    assert read_profile(path) == profile == find_profile(str(path))


def vars_of(profile: Profile) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in profile.__slots__}


def test_a_fit_may_be_missing(path: Path):
    without = fields(path)
    del without["fit"]
    path.write_text(json.dumps(without))
    assert read_profile(path).fit is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers: Input should be greater than or equal to 1"),
        ({"layers": "4"}, "layers: Input should be a valid integer"),
        ({"name": ""}, "name: String should have at least 1 character"),
        ({"colour": "red"}, "colour: Unexpected keyword argument"),
        ({"put": {"bandwidth": 0}}, "put.bandwidth: Input should be greater than 0"),
        ({"put": {"bandwidth": 1, "lag": 1}}, "put.lag: Unexpected keyword argument"),
        ({"put": None}, "put: Input should be"),
        ({"step": {"step_ms": 1}}, "step: Unable to extract tag"),
        ({"step": {"kind": "magic"}}, "step: Input tag 'magic' found"),
        ({"step": {"kind": "fixed", "step_ms": -1}}, "step.fixed.step_ms: Input should be greater"),
        ({"scatter": [1.0, 0.0]}, "scatter.1: Input should be greater than 0"),
        ({"scatter": [1.0] * 257}, "scatter: Tuple should have at most 256 items"),
        ({"step": {"kind": "fitted", "prefill": [1, 2]}}, "step.fitted.prefill.2: Field required"),
        ({"fit": {"prefill": {}}}, "fit.prefill.points: Field required"),
        ({"version": 2}, "version 2 of a profile, where this microserve reads version 1"),
        ({"version": "1"}, 'version "1" of a profile'),
        ({"version": True}, "version true of a profile"),
    ],
)
def test_a_damaged_field_is_named(path: Path, change: dict[str, Any], says: str):
    path.write_text(json.dumps({**fields(path), **change}))
    with pytest.raises(BadRequest) as refused:
        read_profile(path)
    assert refused.value.message.startswith(f"{path}: {says}")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "name", [field for field in PROFILE.__slots__ if field not in ("fit", "scatter")]
)
def test_a_missing_field_is_named(path: Path, name: str):
    without = fields(path)
    del without[name]
    path.write_text(json.dumps(without))
    with pytest.raises(BadRequest, match=rf"{name}: Field required") as refused:
        read_profile(path)
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"version": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a profile: it has no version"),
        (b"{}", "not a profile: it has no version"),
        (b"7", "not a profile"),
    ],
)
def test_a_file_that_is_no_profile(path: Path, content: bytes, says: str):
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=says) as refused:
        read_profile(path)
    assert refused.value.message.startswith(f"{path}: ")


def test_files_that_cannot_be_read_or_written(path: Path, tmp_path: Path):
    with pytest.raises(BadRequest, match="No such file"):
        find_profile(str(path))
    with pytest.raises(BadRequest, match="Is a directory"):
        read_profile(tmp_path)
    with pytest.raises(BadRequest, match="No such file"):
        write_profile(PROFILE, tmp_path / "missing" / "profile.json")


@pytest.mark.parametrize("name", ["layers", "context_length"])
def test_counts_have_the_bounds_that_engines_have(path: Path, name: str):
    path.write_text(json.dumps({**fields(path), name: 2**31}))
    with pytest.raises(BadRequest, match=f"{name}: Input should be less than 2147483648"):
        read_profile(path)


def test_a_file_has_a_bound(path: Path, monkeypatch):
    monkeypatch.setattr("engine.latency.profile.MOST_BYTES", 1000)
    path.write_bytes(b" " * 1001)
    with pytest.raises(BadRequest, match="a profile has 1000 bytes at most"):
        read_profile(path)
