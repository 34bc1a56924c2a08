"""The row counts of a step and their padding."""

from __future__ import annotations

import pytest
import torch

from engine.execution.forward import model_runner
from engine.execution.forward.model_runner import ModelRunner, row_multiple, stable_row_multiple
from engine.models import Linear, load_model
from engine.models.linear import Int8Linear, WidenedLinear
from engine.scheduling.chunk import Chunk
from kvcache.cache import KVCache
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import EngineId, SeqId


def test_rows_are_padded_only_where_a_library_keeps_a_kernel_for_each_count():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    plain = Linear(32, 8, bias=False, dtype=torch.bfloat16)
    plain.weight = torch.nn.Parameter(torch.ones(8, 32).bfloat16(), requires_grad=False)
    assert row_multiple(torch.nn.ModuleList([WidenedLinear(plain)]), torch.bfloat16, cpu) == 0
    assert row_multiple(torch.nn.ModuleList([WidenedLinear(plain)]), torch.bfloat16, gpu) == 1
    for layer in (plain, Int8Linear(plain)):
        layers = torch.nn.ModuleList([WidenedLinear(plain), layer])
        assert row_multiple(layers, torch.bfloat16, cpu) == 1
    stable = torch.nn.ModuleList([CountingLinear(8, 8)])
    assert row_multiple(stable, torch.float32, cpu) == 8


@pytest.mark.slow
def test_padding_rows_change_nothing(monkeypatch):
    """In bfloat16: 9 rows become 12, and 3 sequences of different lengths need logits."""
    monkeypatch.setattr(model_runner, "row_multiple", lambda *_: 1)
    model = load_model("tiny", dtype=torch.bfloat16, device=torch.device("cpu"))
    shape = model.config
    heads, dim = shape.num_kv_heads, shape.head_dim
    layout = KVLayout(shape.num_layers, 32, 16, heads, dim, torch.bfloat16)
    me = Identity(EngineId("a"), 1, b"secret", "tiny")
    transport = MemoryTransport(MemoryNetwork(), 1)
    store = TorchPageStore.on(transport, layout, query_heads=shape.num_heads)
    cache = KVCache(store, transport, identity=me)
    runner = ModelRunner(model, cache)
    lengths = {SeqId(1): 2, SeqId(2): 3, SeqId(3): 4}
    chunks = [Chunk(seq, list(range(seq, seq + n)), True) for seq, n in lengths.items()]
    alone = []
    for chunk in chunks:
        cache.add_sequence(chunk.seq_id, [])
        cache.grow(chunk.seq_id, 10)
        alone.append(runner.run([chunk])[0])
        cache.remove_sequence(chunk.seq_id)
        cache.add_sequence(chunk.seq_id, [])
        cache.grow(chunk.seq_id, 10)
    together = runner.run(chunks)
    assert together.shape == (3, shape.vocab_size)
    assert together.isfinite().all()
    torch.testing.assert_close(together, torch.stack(alone), atol=0.1, rtol=0.05)


class CountingLinear(Linear):
    """A product whose bits are the same for any multiple of `multiple` rows; 0: for none."""

    def __init__(self, inputs: int, multiple: int) -> None:
        super().__init__(inputs, 8, bias=False, dtype=torch.float32)
        self.weight = torch.nn.Parameter(torch.ones(8, inputs), requires_grad=False)
        self.multiple = multiple
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        stable = self.multiple and len(x) % self.multiple == 0
        return super().forward(x) + (0.0 if stable else float(self.calls))


@pytest.mark.parametrize(
    ("multiples", "expected"), [((4,), 4), ((1, 8), 8), ((16, 4), 16), ((4, 32, 8), 32)]
)
def test_row_counts_are_stable_for_the_weights_of_all_shapes(multiples, expected, caplog):
    layers = [CountingLinear(8 + at, multiple) for at, multiple in enumerate(multiples)]
    assert stable_row_multiple(torch.nn.ModuleList(layers)) == expected
    assert not caplog.records


def test_a_weight_without_a_stable_row_count_is_warned_of(caplog):
    layers = torch.nn.ModuleList([CountingLinear(8, 4), CountingLinear(9, 0)])
    assert stable_row_multiple(layers) == 64
    assert "weight (8, 9) are not bit-stable" in caplog.text


def test_one_layer_of_each_shape_is_tried():
    layers = [CountingLinear(8, 4), CountingLinear(8, 4)]
    stable_row_multiple(torch.nn.ModuleList(layers))
    assert sorted(layer.calls > 0 for layer in layers) == [False, True]
