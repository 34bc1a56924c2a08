"""Parts of a model: together they hold all of it, and compute what the whole does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from model_helpers import CPU, DenseCache, hf_model, load, save_folder
from test_models_parity import CASES, TOKENS
from torch import Tensor

from engine.models import load_model, split_model
from engine.models.decoder import Transformer
from engine.models.loading.tiny import open_tiny
from kvcache.errors import BadRequest

SMOLLM2 = replace(
    open_tiny().config, num_layers=30, num_heads=9, num_kv_heads=3, hidden_size=576, head_dim=64,
    intermediate_size=1536, vocab_size=49152,
)  # fmt: skip


class Stage:
    """The sums of a stage whose workers are threads."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=20)
        self._parts: list[Tensor | None] = [None] * workers

    def sum_of(self, worker: int) -> Callable[[Tensor], Tensor]:
        def total(own: Tensor) -> Tensor:
            self._parts[worker] = own
            self._barrier.wait()
            result = torch.stack([part for part in self._parts if part is not None]).sum(0)
            self._barrier.wait()
            return result

        return total


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (3, 1), (1, 2), (3, 5)])
def test_parts_hold_each_head_layer_unit_and_word_once(split: tuple[int, int]):
    tp, pp = split
    config = SMOLLM2
    parts = split_model(config, tp=tp, pp=pp)
    assert len(parts) == tp * pp
    for stage in (parts[tp * number : tp * (number + 1)] for number in range(pp)):
        assert len({part.layers for part in stage}) == 1
        for name, count in (
            ("kv_heads", config.num_kv_heads), ("heads", config.num_heads),
            ("inner", config.intermediate_size), ("vocab", config.vocab_size),
        ):  # fmt: skip
            assert [i for part in stage for i in getattr(part, name)] == list(range(count))
        assert [part.leads for part in stage] == [True] + [False] * (tp - 1)
    assert [i for part in parts[::tp] for i in part.layers] == list(range(config.num_layers))
    assert [part.first for part in parts] == [True] * tp + [False] * (tp * pp - tp)
    assert [part.last for part in parts] == [False] * (tp * pp - tp) + [True] * tp


def test_stages_have_as_many_weights_as_each_other():
    """A head of SmolLM2 has as many as eight layers."""
    first, last = split_model(SMOLLM2, tp=1, pp=2)
    assert (len(first.layers), len(last.layers)) == (19, 11)
    assert [len(part.layers) for part in split_model(SMOLLM2, tp=1, pp=5)] == [8, 7, 7, 7, 1]
    assert [len(part.layers) for part in split_model(SMOLLM2, tp=1, pp=30)] == [1] * 30


def test_an_engine_for_prompts_divides_its_layers_evenly():
    for stages, layers in ((2, [15, 15]), (4, [8, 8, 7, 7])):
        parts = split_model(SMOLLM2, tp=1, pp=stages, decodes=False)
        assert [len(part.layers) for part in parts] == layers


def test_more_parts_than_there_is_to_divide_are_refused():
    with pytest.raises(BadRequest, match="3 KV heads cannot be split over 4 workers"):
        split_model(SMOLLM2, tp=4, pp=1)
    with pytest.raises(BadRequest, match="30 layers cannot be split over 31 stages"):
        split_model(SMOLLM2, tp=1, pp=31)


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parts_compute_the_logits_of_the_whole(case, split, tmp_path):
    kind, settings = CASES[case]
    folder = save_folder(hf_model(kind, **settings), tmp_path)
    whole = load(folder)
    expected = in_parts([whole.transformer], whole.config, TOKENS)
    tp, pp = split
    transformers = []
    for number, part in enumerate(split_model(whole.config, tp=tp, pp=pp)):
        if number % tp == 0:
            stage = Stage(tp)
        transformers.append(
            load_model(
                str(folder), dtype=torch.float32, device=CPU, part_of=lambda _config, p=part: p,
                sum_=stage.sum_of(number % tp) if tp > 1 else None,
            ).transformer
        )  # fmt: skip
    torch.testing.assert_close(
        in_parts(transformers, whole.config, TOKENS), expected, atol=1e-4, rtol=0
    )
    sizes = [sum(weight.numel() for weight in each.parameters()) for each in transformers]
    assert max(sizes) < sum(weight.numel() for weight in whole.transformer.parameters())


@torch.inference_mode()
def in_parts(transformers: Sequence[Transformer], config, tokens: Sequence[int]) -> Tensor:
    """Return the logits of tokens, computed stage by stage; the parts of a stage are threads."""
    padded = [*tokens, *[0] * (-len(tokens) % 4)]
    ids, positions = torch.tensor(padded), torch.arange(len(padded))
    stages: dict[range, list[Transformer]] = {}
    for each in transformers:
        stages.setdefault(each.part.layers, []).append(each)
    hidden: Tensor | None = None
    for stage in stages.values():
        results: list[Tensor | None] = [None] * len(stage)

        @torch.inference_mode()
        def compute(number: int, transformer: Transformer, before=hidden, out=results) -> None:
            part = transformer.part
            own = replace(config, num_kv_heads=len(part.kv_heads), num_heads=len(part.heads))
            cache = DenseCache(own)
            cache.begin(len(tokens))
            rows = transformer.embedded(ids) if before is None else before.clone()
            rows = transformer.run(rows, positions, cache)
            out[number] = transformer.logits(rows) if part.last else rows

        threads = [
            threading.Thread(target=compute, args=(number, each))
            for number, each in enumerate(stage)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        got = [result for result in results if result is not None]
        assert len(got) == len(stage)
        if stage[0].part.last:
            return torch.cat(got, dim=1)[: len(tokens)]
        assert all(torch.equal(result, got[0]) for result in got)
        hidden = got[0]
    raise AssertionError("no stage is the last one")
