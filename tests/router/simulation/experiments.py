"""Experiments whose outcomes are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.latency import FixedLatency, Profile, PutLatency
from engine.latency.step import StepLatency
from engine.protocol import EngineConfig
from router.rollout import Catalog
from router.simulation import Death, Experiment, SimulatedEngine
from router.workload import WorkloadConfig

PROMPT = 64  # tokens


def profile(step: StepLatency, **fields: Any) -> Profile:
    """A profile with room for everything."""
    given: dict[str, Any] = {
        "name": "made-up", "model": "made-up", "device": "none", "gpus": 0, "source": "made up",
        "layers": 4, "kv_bytes_per_token": 1000, "context_length": 8192, "pool_tokens": 1 << 17,
        "step": step, "put": PutLatency(bandwidth=1e9, layer_s=1e-5), **fields,
    }  # fmt: skip
    return Profile(**given)


def engine(name: str, step: StepLatency, **flags: Any) -> SimulatedEngine:
    config = EngineConfig(**{"engine_id": name, "token_budget": PROMPT, **flags})
    return SimulatedEngine(config, profile(step))


def served_in(seconds: float, name: str = "engine-0") -> SimulatedEngine:
    """An engine that takes so long for a prompt of `PROMPT` tokens, one after the other."""
    return engine(name, FixedLatency(0.0, PROMPT / (seconds * 1e3)))


def experiment(
    strategy: str, fleet: list[SimulatedEngine], rate: float, requests: int, **fields: Any
) -> Experiment:
    """Poisson arrivals of prompts with `PROMPT` tokens, and calls that take no time."""
    params = fields.pop("params", {})
    deaths = tuple(Death(*death) for death in fields.pop("deaths", ()))
    given: dict[str, Any] = {"input": PROMPT, "output": 1, "rate": rate, "call_s": 0.0, **fields}
    call_s = given.pop("call_s")
    workload = WorkloadConfig(name="fixed", **given)
    bound = Catalog().find(strategy).bind(params)
    return Experiment(bound, tuple(fleet), workload, requests, deaths, call_s)


def strategy_file(folder: Path, body: str) -> str:
    """Write a strategy `mine` with this body, and return its path."""
    path = folder / "mine.py"
    path.write_text(
        "import asyncio\nfrom router import Chunk, strategy\n\n"
        "@strategy\nasync def mine(request, cluster):\n"
        "    engine = cluster.engines.least_loaded()\n" + body
    )
    return str(path)
