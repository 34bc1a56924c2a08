"""docs/figures.md shows what `make figures` has saved, and the parts of the generator work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.figures import (
    dejavu,
    distserve,
    distserve_load,
    infinite_llm,
    migration,
    real_engines,
    serving,
)
from bench.figures.__main__ import PAPERS
from bench.figures.claims import Part, by_effect, by_places, rounded
from bench.figures.code_lines import count_lines
from bench.figures.long_runs import ARMS
from bench.figures.long_runs import run as run_long
from bench.figures.long_settings import FOUR_GPUS
from bench.figures.page import PAGE, load, render, renewed
from bench.figures.pictures import draw
from bench.figures.runs import OURS, PAPER, Size, data_parallel_pair, one_prefill, run
from router.workload import WorkloadConfig

TINY = Size(requests=12, seeds=1)
SAVED = load()


def test_the_tables_are_those_of_the_saved_documents():
    assert renewed(PAGE.read_text(), SAVED) == PAGE.read_text()


def test_all_figures_are_saved_and_on_the_page():
    text = PAGE.read_text()
    assert set(SAVED) == set(PAPERS)
    for paper, parts in PAPERS.items():
        assert list(SAVED[paper]["parts"]) == list(parts)
        for name, part in SAVED[paper]["parts"].items():
            assert not part["claims"] or f"<!-- begin claims {name} -->" in text


def test_every_picture_exists_and_is_shown():
    named = set(re.findall(r"\(figures/([\w.-]+)\)", PAGE.read_text()))
    assert named == {path.name for path in (PAGE.parent / "figures").iterdir()}


@pytest.mark.parametrize(
    ("name", "paper", "compute"),
    [
        ("figure-12", "microserving", migration.figure_12),
        ("table-3", "microserving", migration.table_3),
        ("real-engines-load", "microserving", real_engines.under_load),
        ("real-engines-moves", "microserving", real_engines.moves),
        ("dejavu-tables-2-3", "dejavu", dejavu.splits),
        ("dejavu-table-6", "dejavu", dejavu.table_6),
        ("infinite-llm-table-1", "infinite-llm", infinite_llm.table_1),
    ],
)
def test_what_is_computed_in_no_time_is_what_was_saved(name, paper, compute):
    part = compute()
    assert rounded(part.data) == SAVED[paper]["parts"][name]["data"]
    said = [
        {setting: answer.verdict for setting, answer in claim.answers.items()}
        for claim in part.claims
    ]
    assert said == [
        {setting: answer["verdict"] for setting, answer in claim["answers"].items()}
        for claim in SAVED[paper]["parts"][name]["claims"]
    ]


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        (-0.21, -0.16, "reproduced"),
        (-0.21, -0.15, "in direction"),
        (-0.21, -0.39, "in direction"),
        (-0.21, -0.01, "not reproduced"),
        (-0.21, 0.1, "not reproduced"),
        (0.7, 0.6, "reproduced"),
    ],
)
def test_verdicts_on_effects(paper, ours, verdict):
    assert by_effect(paper, ours) == verdict


def test_verdicts_on_statements():
    assert by_places([True, True]) == "reproduced"
    assert by_places([True, True, False]) == "in direction"
    assert by_places([True, False]) == "not reproduced"


@pytest.mark.parametrize(
    "compute",
    [
        lambda: serving.figure_10(TINY, (1.0,)),
        pytest.param(lambda: serving.figure_11(TINY, (1.0, 2.5)), marks=pytest.mark.thorough),
        lambda: serving.figure_13(TINY, (2.0,), (1.0,)),
        lambda: dejavu.makespans((2, 4), 64),
        lambda: dejavu.latency(80),
        lambda: distserve.figure_4(200),
        lambda: distserve_load.figure_10(6),
        lambda: distserve_load.figure_8(12, (1.0,)),
    ],
)
def test_a_small_run_answers_each_claim_and_draws_each_picture(compute, tmp_path: Path):
    part: Part = compute()
    for claim in part.claims:
        assert claim.answers and all(answer.ours for answer in claim.answers.values())
    for name, panels in part.pictures.items():
        draw(panels, tmp_path / name)
        assert (tmp_path / name).read_text().startswith("<?xml")


def test_a_point_is_the_same_each_time_and_another_arm_is_another():
    workload = WorkloadConfig("paper")
    pattern = data_parallel_pair
    first, again = (run(pattern, PAPER, workload, 2.0, 12, [0]) for _ in range(2))
    assert first == again
    assert run(pattern, OURS, workload, 2.0, 12, [0]).mean != first.mean


@pytest.mark.parametrize("arm", [*ARMS[:2], pytest.param(ARMS[2], marks=pytest.mark.slow)])
def test_long_requests_are_beyond_a_pool_and_all_time_has_one_use(arm):
    found = run_long(FOUR_GPUS, arm, 0.3, 3, 0.05, 0)
    assert found.beyond == 1
    assert found.refused == (1 if arm == "no borrowing" else 0)
    assert (found.moved > 0) == arm.startswith("borrowing")
    used = found.long + found.other + found.waits + found.shut
    assert 0 < used <= 1 + 1e-6
    assert min(found.other, found.waits + 1e-6, found.shut + 1e-6, found.pool) > 0


def test_a_run_that_borrows_nothing_is_no_result():
    with pytest.raises(ValueError, match="no request is longer than a pool"):
        run_long(FOUR_GPUS, "borrowing", 0.01, 3, 0.05, 0)


def test_a_median_is_shown_with_its_spread():
    data = {"rows": [], "times": [{"arm": "one", "rate": {"min": 1.0, "median": 2.0, "max": 3.5}}]}
    document = {"parts": {"part": {"claims": [], "data": data}}}
    assert render("rows part times", {"paper": document}).endswith("| one | 2 (1–3.5) |")


def test_engines_of_a_pattern_share_the_rate():
    point = run(one_prefill(2), PAPER, WorkloadConfig("sharegpt"), 1.0, 12, [0])
    assert point.pattern == "1P2D" and len(point.busy) == 3 and 0 < min(point.busy) <= 1


def test_the_ratio_of_a_sweep_is_of_the_same_rate():
    part = serving.figure_13(TINY, (1.0,), (1.0,))
    points = {p["pattern"]: p for p in part.data["3000"]["points"] if p["arm"] == PAPER.name}
    best = max(points[f"ratio {ratio}"]["p99"]["jct"] for ratio in (0.2, 0.3))
    answer = part.claims[0].answers[PAPER.name]
    assert answer.ours.startswith(f"{best / points['ratio 0.1']['p99']['jct']:.2f}×")


def test_lines_of_code():
    source = '''"""Docstring
of two lines."""

import router  # counts


@strategy
async def one(request):
    """Docstring."""
    # comment
    yield 1
'''
    assert count_lines(source) == (4, 3)


def test_a_block_that_does_not_exist_is_a_mistake():
    with pytest.raises(KeyError):
        render("claims of nobody", SAVED)
