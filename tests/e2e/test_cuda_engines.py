"""Engines on a GPU behind a router: all strategies, and deaths in the middle of puts.

Both engines are on one GPU; KV moves between their pools by CUDA IPC.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_deployment import UpDeployment, deployed

from bench.random_model import llama
from engine.models.loading.tiny import _weights, open_tiny
from engine.models.model_folder import write_folder

pytestmark = [pytest.mark.cuda, pytest.mark.slow, pytest.mark.processes]
LENGTHS = [1, 15, 16, 17, 128, 129, 400, 1500]
NEW = 24
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("prefill_decode", {}),
    ("balanced", {"ratio": 0.3}),
    ("cache_aware", {}),
    ("migrate", {}),
    ("replicate", {"every": 4}),
]


def prompts(vocab: int, salt: object) -> list[list[int]]:
    source = random.Random(str(salt))
    return [[source.randrange(vocab) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpDeployment]:
    folder = tmp_path_factory.mktemp("cpu")
    with deployed(folder, "tiny", "--engines", "1", "--pool-pages", "2048") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpDeployment]:
    folder = tmp_path_factory.mktemp("gpu")
    flags = ("--engines", "2", "--device", "cuda", "--pool-pages", "2048")
    with deployed(folder, "tiny", *flags) as deployment:
        yield deployment


@pytest.mark.parametrize(("strategy", "params"), STRATEGIES, ids=[name for name, _ in STRATEGIES])
def test_the_tokens_of_a_cpu_under_every_strategy(
    on_cpu: UpDeployment, on_gpu: UpDeployment, strategy: str, params: dict[str, Any]
) -> None:
    on_gpu.use(strategy, **params)
    put = 0
    for prompt in prompts(500, strategy):
        wanted = on_cpu.complete(prompt, greedy=NEW, model="tiny")
        for _ in range(2):  # the second run finds the first one's pages
            reply = on_gpu.complete(prompt, greedy=NEW, model="tiny")
            assert reply["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
            legs = on_gpu.receipt(reply["request_id"])["legs"]
            put += sum(leg.get("sent_tokens") or 0 for leg in legs)
    print(f"{strategy}: {put} tokens put")
    if strategy in ("prefill_decode", "balanced"):
        assert put > 1000
    for engine in on_gpu.engines:
        engine.check_at_rest()


@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_is_killed_under_load(on_cpu: UpDeployment, tmp_path: Path, victim: int) -> None:
    """Each request ends with the tokens of an engine that nobody disturbed."""
    asked = prompts(500, victim)[4:] * 4
    wanted = [on_cpu.complete(p, greedy=64, model="tiny")["choices"][0]["token_ids"] for p in asked]
    flags = ("--engines", "2", "--device", "cuda", "--pool-pages", "2048", "--attempts", "20")
    with deployed(tmp_path, "tiny", *flags) as deployment:
        deployment.use("prefill_decode")
        answers: list[Any] = [None] * len(asked)

        def ask(n: int) -> None:
            reply = deployment.complete(asked[n], greedy=64, model="tiny")
            answers[n] = reply["choices"][0]["token_ids"]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(asked))]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(deployment.engines[victim].pid, signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert answers == wanted
        survivor = deployment.engines[1 - victim]
        survivor.check_at_rest()
        deployment.engines = [survivor]  # the other one has a new process, and another URL


def test_bfloat16_by_flashinfer_and_graphs(tmp_path: Path) -> None:
    """Answers are complete under every strategy; tokens are equal but for near ties."""
    pytest.importorskip("flashinfer")
    config = llama(
        layers=4, hidden=512, inner=1024, heads=8, kv_heads=2, head_dim=64, vocab=512, context=4096
    )
    tensors = _weights(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (folder := tmp_path / "random").mkdir()
    write_folder(
        replace(open_tiny(), config=config, shapes=shapes, read=tensors.__getitem__), folder
    )
    flags = ("--engines", "2", "--device", "cuda", "--pool-pages", "2048", "--log-level", "info")
    with deployed(tmp_path, str(folder), *flags) as deployment:
        model = next(iter(deployment_models(deployment)))
        alone: dict[int, list[int]] = {}
        equal = compared = 0
        for strategy, params in STRATEGIES:
            deployment.use(strategy, **params)
            for n, prompt in enumerate(prompts(500, "bf16")):
                reply = deployment.complete(prompt, greedy=NEW, model=model)
                tokens = reply["choices"][0]["token_ids"]
                assert len(tokens) == NEW
                wanted = alone.setdefault(n, tokens)
                equal += sum(a == b for a, b in zip(tokens, wanted, strict=True))
                compared += NEW
        print(f"{equal} of {compared} tokens are those of the first strategy")
        assert equal > 0.6 * compared
        log = (tmp_path / "up.log").read_text()
        assert "CUDA graphs" in log, log


def deployment_models(deployment: UpDeployment) -> list[str]:
    import httpx

    reply = httpx.get(f"{deployment.url}/v1/models", timeout=30)
    return [one["id"] for one in reply.json()["data"]]
