"""Algorithms 1 and 2 against brute force over a table of made-up goodputs, and what is short."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from engine.latency import MODELS
from engine.protocol import BadRequest
from router.planning import (
    Division,
    Pair,
    fitting_instances,
    high_affinity,
    low_affinity,
    measured_model,
    most_rate,
    node_pairs,
    show_choice,
)

TABLES = st.integers(0, 2**32)


def made_up(seed: int, *what: int) -> float:
    """A goodput between 0 and 6, with ties."""
    return hash((seed, *what)) % 13 / 2


def most_per_gpu(options: list[tuple[float, int]]) -> tuple[Fraction, int]:
    """The most goodput per GPU, and the fewest GPUs that have it, without sorting."""
    best = max(Fraction(goodput) / gpus for goodput, gpus in options)
    return best, min(gpus for goodput, gpus in options if Fraction(goodput) / gpus == best)


@given(TABLES, st.integers(1, 3), st.integers(1, 5), st.floats(0.1, 50))
def test_algorithm_1_is_the_best_of_all_divisions_for_each_phase(seed, nodes, per_node, rate):
    divisions = [
        Division(tp, pp)
        for tp, pp in itertools.product(range(1, 16), range(1, 16))
        if tp <= per_node and tp * pp <= nodes * per_node
    ]
    tables = {phase: {d: made_up(seed, phase, d.tp, d.pp) for d in divisions} for phase in (1, 2)}
    if any(max(table.values()) == 0 for table in tables.values()):
        with pytest.raises(BadRequest, match="not one of"):
            high_affinity(divisions, tables[1].__getitem__, tables[2].__getitem__, rate)
        return
    placed = high_affinity(divisions, tables[1].__getitem__, tables[2].__getitem__, rate)
    for choice, table in ((placed.prefill, tables[1]), (placed.decode, tables[2])):
        best, gpus = most_per_gpu([(goodput, d.gpus) for d, goodput in table.items()])
        chosen = choice.best
        assert Fraction(chosen.goodput) / chosen.candidate.gpus == best
        assert chosen.candidate.gpus == gpus and chosen.goodput == table[chosen.candidate]
        count = chosen.instances(rate)
        assert count * chosen.goodput >= rate * (1 - 1e-6)
        assert (count - 1) * chosen.goodput < rate
        assert choice.gpus == min(each.gpus(rate) for each in choice.ranked if each.goodput)
        assert choice.gpus == choice.count * choice.fewest.candidate.gpus
        assert len(choice.ranked) == len(divisions)
    assert placed.gpus == placed.prefill.gpus + placed.decode.gpus


@given(
    TABLES, st.integers(1, 3), st.integers(2, 5), st.floats(0.1, 50),
    st.sets(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=8),
)  # fmt: skip
def test_algorithm_2_is_the_best_of_all_pairs_that_share_nodes(seed, nodes, per_node, rate, sizes):
    whole = [Division(tp, pp) for tp, pp in sizes]
    options = {}
    for inter, (tp, pp), (tp2, pp2) in itertools.product(range(1, nodes + 1), sizes, sizes):
        shared = pp % inter == 0 and pp2 % inter == 0
        if shared and (tp * pp + tp2 * pp2) // inter <= per_node:
            pair = Pair(inter, Division(tp, pp // inter), Division(tp2, pp2 // inter))
            options[pair] = made_up(seed, inter, tp, pp, tp2, pp2)
    if not options:
        with pytest.raises(BadRequest, match=f"and a node has {per_node}"):
            node_pairs(whole, nodes=nodes, gpus_per_node=per_node)
        return
    pairs = node_pairs(whole, nodes=nodes, gpus_per_node=per_node)
    assert len(pairs) == len(set(pairs)) and set(pairs) == set(options)
    if not max(options.values()):
        return
    choice = low_affinity(pairs, options.__getitem__, rate)
    best, gpus = most_per_gpu([(goodput, pair.gpus) for pair, goodput in options.items()])
    assert Fraction(choice.best.goodput) / choice.best.candidate.gpus == best
    assert choice.best.candidate.gpus == gpus
    assert choice.best.instances(rate) == max(1, ceil(rate / choice.best.goodput - 1e-9))
    assert choice.gpus == min(each.gpus(rate) for each in choice.ranked if each.goodput)


def test_a_rate_of_exactly_three_instances_takes_three():
    placed = high_affinity([Division(1, 1)], lambda _: 0.1, lambda _: 0.2, 0.3)
    assert (placed.prefill.count, placed.decode.count) == (3, 2)


def test_each_phase_has_its_own_best():
    """As printed, algorithm 1 overwrites the goodput of one phase by that of the other."""
    goodput = {Division(1, 1): (1.0, 5.0), Division(2, 1): (4.0, 6.0)}
    placed = high_affinity(goodput, lambda d: goodput[d][0], lambda d: goodput[d][1], 8.0)
    assert placed.prefill.best.candidate == Division(2, 1) and placed.prefill.count == 2
    assert placed.decode.best.candidate == Division(1, 1) and placed.decode.count == 2
    assert placed.gpus == 6


def test_distserve_figure_1():
    """One GPU has 5.6 prefills/s or 10 decodes/s, and 1.6 requests/s of both. Two for prefill and
    one for decode serve 10, which is 3.33 per GPU and 2.1 times as much."""
    one = Division(1, 1)
    placed = high_affinity([one], lambda _: 5.6, lambda _: 10.0, 10.0)
    assert (placed.prefill.count, placed.decode.count, placed.gpus) == (2, 1, 3)
    per_gpu = most_rate(placed, 3) / 3
    assert per_gpu == pytest.approx(3.33, abs=5e-3)
    assert per_gpu / 1.6 == pytest.approx(2.1, abs=0.05)


@pytest.mark.parametrize(
    ("model", "nodes", "per_node", "fitting"),
    [
        ("opt-13b", 1, 4, {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}),
        ("opt-66b", 1, 4, {(2, 1), (2, 2), (3, 1), (4, 1)}),
        ("opt-13b", 2, 1, {(1, 1), (1, 2)}),
    ],
)
def test_divisions_divide_heads_and_layers_and_fit_in_memory(model, nodes, per_node, fitting):
    """OPT-66B takes 123 GiB: no single A100 holds it, and `pp=3` does not divide 64 layers."""
    measured = measured_model(model, "a100")
    found = fitting_instances(measured, nodes=nodes, gpus_per_node=per_node)
    assert {(division.tp, division.pp) for division in found} == fitting
    for division, instance in found.items():
        assert instance.step.pp == division.pp and instance.pool_tokens > 0


def test_what_is_short_is_said():
    opt66 = measured_model("opt-66b", "a100")
    with pytest.raises(BadRequest, match="GPU memory: with tp=1 pp=1, the weights take") as error:
        fitting_instances(opt66, nodes=1, gpus_per_node=1)
    assert "the smallest instance that fits has tp=2 pp=1, on 2 GPUs" in error.value.message
    with pytest.raises(BadRequest, match="GPU memory: tp=2 pp=1 has room for 11600 tokens"):
        fitting_instances(opt66, nodes=1, gpus_per_node=2, longest=12000)
    opt13 = measured_model("opt-13b", "a100")
    fits = fitting_instances(opt13, nodes=3, gpus_per_node=1)
    with pytest.raises(BadRequest, match="GPUs: prefill and decode together need 2 GPUs of a node"):
        node_pairs(fits, nodes=3, gpus_per_node=1)


def test_heads_that_cannot_be_divided_are_named():
    opt175 = replace(measured_model("opt-66b", "a100"), shape=MODELS["opt-175b"])
    with pytest.raises(BadRequest, match="; 96 heads cannot be divided by 5, 7"):
        fitting_instances(opt175, nodes=1, gpus_per_node=7, longest=10**6)


@pytest.mark.parametrize(
    ("model", "device", "message"),
    [
        ("gpt", "a100", "no model is called 'gpt'; there are bloom-176b"),
        ("opt-13b", "abacus", "no device is called 'abacus'"),
        ("opt-13b", "h100", "no profile gives fitted latencies of opt-13b@h100"),
    ],
)
def test_unknown_names(model, device, message):
    with pytest.raises(BadRequest, match=message):
        measured_model(model, device)


@given(TABLES, st.integers(1, 40))
def test_the_most_that_so_many_gpus_serve(seed, gpus):
    source = Random(seed)
    sizes = Division(source.randint(1, 4), 1), Division(source.randint(1, 4), 2)
    goodputs = source.randint(1, 9), source.randint(1, 9)
    placed = high_affinity([sizes[0]], lambda _: goodputs[0], lambda _: goodputs[1], 1.0)
    size = sizes[0].gpus
    counts = itertools.product(range(41), range(41))
    options = [min(n * goodputs[0], m * goodputs[1]) for n, m in counts if (n + m) * size <= gpus]
    assert most_rate(placed, gpus) == max(options)
    pairs = low_affinity([Pair(1, *sizes)], lambda _: goodputs[0], 1.0)
    assert most_rate(pairs, gpus) == gpus // (sizes[0].gpus + sizes[1].gpus) * goodputs[0]


@pytest.mark.parametrize(("rate", "fewer"), [(2.0, True), (8.0, False)])
def test_a_table_says_why_others_lost_and_where_fewer_gpus_suffice(rate, fewer):
    goodput = {Division(1, 1): 2.0, Division(4, 1): 9.0, Division(2, 1): 4.0, Division(8, 1): 0.0}
    choice = low_affinity(goodput, goodput.__getitem__, rate)  # type: ignore[arg-type]
    console = Console(record=True, width=120)
    show_choice("a table", choice, console)
    text = console.export_text()
    star, reason = ("★  tp=1", "needs 3 GPUs more") if fewer else ("★  tp=4", "11% less per GPU")
    assert text.index(star) < text.index(reason) < text.index("tp=8")
    assert text.count("★") == 1 and choice.gpus == (1 if fewer else 4)
    assert "misses the objectives even without load" in text
    assert ("would take 1 x tp=4 pp=1: 4 GPUs, where 1 suffice for 2" in text) == fewer
