"""Forward passes on a GPU: as on a CPU, with CUDA graphs and without."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from smollm2_greedy import continuations

from bench.random_model import llama, random_model
from engine.execution.forward.model_runner import ModelRunner
from engine.models import LoadedModel, load_model
from engine.protocol import Internal
from engine.scheduling import Chunk
from kvcache.cache import KVCache
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.page_store import TorchPageStore
from kvcache.transport import make_transport
from kvcache.types import EngineId, SeqId

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CONTEXT = 512
LENGTHS = [5, 130, 17, 64, 300, 1, 33, 90, 200, 16, 31, 47]


class Runs:
    """One model over one pool, which generates greedily."""

    def __init__(self, model: LoadedModel, dtype: torch.dtype, device: torch.device, graphs: int):
        of = model.config
        layout = KVLayout(of.num_layers, 400, 16, of.num_kv_heads, of.head_dim, dtype)
        transport = make_transport("auto", 1, secret=b"secret", device=device)
        store = TorchPageStore.on(transport, layout, query_heads=of.num_heads)
        me = Identity(EngineId("a"), 1, b"secret", "same")
        self.cache = KVCache(store, transport, identity=me)
        self.runner = ModelRunner(
            model, self.cache, graph_rows=graphs, context=CONTEXT, prompt_rows=256 if graphs else 0
        )

    def greedy(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], torch.Tensor]:
        """Return `count` tokens for each prompt, decoded together, and the last logits."""
        names = [SeqId(n) for n in range(len(prompts))]
        latest = []
        for name, prompt in zip(names, prompts, strict=True):
            self.cache.add_sequence(name, [])
            self.cache.grow(name, len(prompt) + count)
            latest.append(int(self.runner.run([Chunk(name, prompt, True)])[0].argmax()))
        outputs = [[token] for token in latest]
        logits = torch.empty(0)
        for _ in range(count - 1):
            chunks = [
                Chunk(name, [out[-1]], True) for name, out in zip(names, outputs, strict=True)
            ]
            logits = self.runner.run(chunks)
            for out, token in zip(outputs, logits.argmax(-1).tolist(), strict=True):
                out.append(token)
        for name in names:
            self.cache.remove_sequence(name)
        self.cache.check_integrity()
        return outputs, logits.clone()


def prompts(vocab: int) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(vocab) for _ in range(length)] for length in LENGTHS]


def test_float32_gives_the_tokens_of_a_cpu():
    answers = []
    for device in (CPU, GPU):
        model = load_model("tiny", dtype=torch.float32, device=device)
        runs = Runs(model, torch.float32, device, graphs=16)
        answers.append(runs.greedy(prompts(500), 40)[0])
        runs.cache.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_smollm2_continues_as_transformers_does(dtype: torch.dtype):
    """In float32 by torch's attention; in bfloat16 by FlashInfer and graphs, up to close calls."""
    model = load_model("smollm2", dtype=dtype, device=GPU)
    runs = Runs(model, dtype, GPU, graphs=16)
    expected = continuations()
    equal = 0
    for each in expected:
        (got,), _ = runs.greedy([each.prompt], len(each.tokens))
        if dtype == torch.float32:
            each.check(got, each.text)
        for token, wanted, gap in zip(got, each.tokens, each.gaps, strict=True):
            if token != wanted:
                assert gap < 0.5, f"{each.text}: {token} and not {wanted}, with a gap of {gap}"
                break  # what follows another token differs
            equal += 1
    print(f"{equal} of {sum(len(each.tokens) for each in expected)} tokens before the first other")
    runs.cache.close()


@pytest.fixture(scope="module", params=[64, 128])
def random_llama(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    pytest.importorskip("flashinfer")
    config = llama(
        layers=4, hidden=512, inner=1024, heads=8, kv_heads=2, head_dim=request.param, vocab=1024
    )
    yield random_model(config, torch.bfloat16, GPU)


def test_graphs_give_the_logits_of_single_kernels(random_llama: LoadedModel):
    """12 decodes in a graph of 12 rows; 7 in one of 7; and 9 rows padded to 12."""
    alone = Runs(random_llama, torch.bfloat16, GPU, graphs=0)
    graphs = Runs(random_llama, torch.bfloat16, GPU, graphs=16)
    assert graphs.runner._graphs is not None and alone.runner._graphs is None
    replays = []
    run = graphs.runner._graphs.run
    graphs.runner._graphs.run = lambda *given: replays.append(out := run(*given)) or out
    for count in (12, 7, 9):
        some = prompts(1000)[:count]
        # One step: later ones would follow from tokens that near ties have made different.
        (_, wanted), (_, got) = alone.greedy(some, 2), graphs.greedy(some, 2)
        assert replays[-1] is not None
        assert got.shape == wanted.shape == (count, 1024)
        torch.testing.assert_close(got, wanted, atol=0.06, rtol=0.03)
    before = len([out for out in replays if out is not None])
    graphs.greedy(prompts(1000), 30)
    # 29 steps of all, and the prompt of one token.
    assert len([out for out in replays if out is not None]) - before == 30
    for runs in (alone, graphs):
        runs.cache.close()


def test_graphs_around_attention_give_the_logits_of_single_kernels(random_llama: LoadedModel):
    """Prompts, alone and beside decodes, in chunks: 90, 17 + 33 + 1 and 300 rows (no graph)."""
    several = [Runs(random_llama, torch.bfloat16, GPU, graphs=graphs) for graphs in (0, 16)]
    assert several[1].runner._segments is not None
    long, *shorter = (prompts(1000)[n] for n in (7, 2, 6))
    results = []
    for runs in several:
        names = [SeqId(n) for n in range(4)]
        for name in names:
            runs.cache.add_sequence(name, [])
            runs.cache.grow(name, 400)
        steps = [
            [Chunk(names[0], long, True)],
            [Chunk(names[1], shorter[0], True), Chunk(names[0], [5], True),
             Chunk(names[2], shorter[1], False)],
            [Chunk(names[3], [*prompts(1000)[4]], True)],
            [Chunk(names[1], [9], True), Chunk(names[2], [8, 7, 6], True)],
        ]  # fmt: skip
        results.append([runs.runner.run(chunks).clone() for chunks in steps])
        for name in names:
            runs.cache.remove_sequence(name)
        runs.cache.check_integrity()
        runs.cache.close()
    for wanted, got in zip(*results, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, atol=0.06, rtol=0.03)


def test_a_step_that_is_wrong_leaves_the_runner_usable(random_llama: LoadedModel):
    runs = Runs(random_llama, torch.bfloat16, GPU, graphs=8)
    some = prompts(1000)[:3]
    first = runs.greedy(some, 10)[0]
    runs.cache.add_sequence(SeqId(99), [])
    with pytest.raises((IndexError, Internal)):  # it has no pages
        runs.runner.run([Chunk(SeqId(99), [1, 2, 3], True)])
    runs.cache.remove_sequence(SeqId(99))
    assert runs.greedy(some, 10)[0] == first
    runs.cache.close()
