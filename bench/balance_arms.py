"""What `bench.balance` compares: our engines with two settings of the scheduler, and vLLM's.

An `Arm` is a pair of engines on a core each. It serves a run of requests at their times.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.deployment import Deployment, deployed
from bench.peer_vllm import PYTHON, environment, model_folder, serve
from bench.processes import cpu_s, free_port, running, stopped_server, tree_cpu_s
from bench.real_load import BODY, throughput
from router.engines.http_client import HttpClient
from router.load.client import Outcome, Target, open_loop
from router.workload import LoadRequest

__all__ = ["STRATEGIES", "Arm", "Ours", "Vllm", "our_arm", "vllm_arm"]

CONNECT_S, START_S = 30.0, 600.0
CONTEXT = 1024  # tokens, of vLLM's sequences
GREEDY = {**BODY, "temperature": 0}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("data_parallel", {}),
    "1P1D": ("prefill_decode", {}),
    "balanced 0.1": ("balanced", {"ratio": 0.1}),
    "balanced 0.2": ("balanced", {"ratio": 0.2}),
    "balanced 0.3": ("balanced", {"ratio": 0.3}),
    "balanced auto": ("balanced", {"ratio": "auto"}),
}


class Arm(Protocol):
    """A pair of engines, and the strategies that it can run."""

    @property
    def strategies(self) -> Sequence[str]: ...

    async def run(self, strategy: str, requests: Sequence[LoadRequest]) -> list[Outcome]:
        """Send each request at its time."""
        ...

    def cpu_s(self) -> float:
        """Return the CPU seconds so far of the arm and of this process."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """Two engines behind a router."""

    deployment: Deployment
    model: str
    strategies: Sequence[str]

    async def run(self, strategy: str, requests: Sequence[LoadRequest]) -> list[Outcome]:
        with self._target(strategy) as target:
            return await open_loop(target, iter(requests))

    async def saturate(self, strategy: str, requests: Sequence[LoadRequest], most: int) -> float:
        """Send the requests, `most` of them at a time; return requests per second."""
        with self._target(strategy) as target:
            await throughput(target, iter(requests[:most]), most)  # warm
            return await throughput(target, iter(requests[most:]), most)

    @contextmanager
    def _target(self, strategy: str) -> Iterator[Target]:
        name, params = STRATEGIES[strategy]
        self.deployment.use(name, **params)
        client = HttpClient(self.deployment.url, connect_timeout_s=CONNECT_S)
        try:
            yield Target(client, self.model, GREEDY)
        finally:
            client.close()

    def cpu_s(self) -> float:
        return self.deployment.cpu_s()


@contextmanager
def our_arm(model: Sequence[str], strategies: Sequence[str], *flags: str) -> Iterator[Ours]:
    """Run two engines and a router."""
    with deployed(*model, *flags) as deployment:
        yield Ours(deployment, model[0], strategies)


@dataclass(frozen=True, slots=True)
class Vllm:
    """Two servers of vLLM, each on a core, which get requests in turn.

    They are stopped between runs, because vLLM's threads spin.
    """

    servers: list[subprocess.Popen[bytes]]
    urls: list[str]
    strategies: Sequence[str] = field(default=("data parallel",))

    async def run(self, strategy: str, requests: Sequence[LoadRequest]) -> list[Outcome]:
        assert strategy in self.strategies
        clients = [HttpClient(url, connect_timeout_s=CONNECT_S) for url in self.urls]
        targets = [Target(client, "peer", GREEDY) for client in clients]
        try:
            with running(*self.servers):
                halves = await asyncio.gather(
                    *(
                        open_loop(target, iter(requests[number :: len(targets)]))
                        for number, target in enumerate(targets)
                    )
                )
        finally:
            for client in clients:
                client.close()
        return [outcome for half in halves for outcome in half]

    def cpu_s(self) -> float:
        return sum(tree_cpu_s(server.pid) for server in self.servers) + cpu_s(os.getpid())


@contextmanager
def vllm_arm(model: str, dtype: str) -> Iterator[Vllm | None]:
    """Run two servers of vLLM; `None` without the peer's environment (`make peers`)."""
    if not PYTHON.exists():
        print("without vLLM: `make peers` has not run", file=sys.stderr)
        yield None
        return
    cores = sorted(os.sched_getaffinity(0))
    folder = model_folder(model)
    with ExitStack() as stack:
        servers, urls = [], []
        for number in range(2):
            port, core = free_port(), cores[number % len(cores)]
            urls.append(f"http://127.0.0.1:{port}")
            command = serve(folder, port, CONTEXT, dtype)
            env = environment() | {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
            server = stopped_server(command, urls[-1], env=env, within_s=START_S)
            servers.append(stack.enter_context(server))
        yield Vllm(servers, urls)
