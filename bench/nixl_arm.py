"""1P1D by vLLM alone: two of its own servers with its `NixlConnector`, and a proxy beside them.

`Nixl` is an `Arm`: what `bench.vllm_fleet` compares its strategies with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from bench.balance_arms import CONNECT_S, GREEDY, START_S
from bench.peer_vllm import environment, model_folder, serve
from bench.processes import cpu_s, free_port, running, stopped_server, tree_cpu_s
from router.engines.http_client import HttpClient
from router.load.client import Outcome, Target, open_loop
from router.workload import LoadRequest

__all__ = ["Nixl", "nixl_arm"]

KV_GIB = "1"
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@dataclass(frozen=True, slots=True)
class Nixl:
    """A prefill server and a decode server on a core each, and the proxy at `url`.

    `engine_url` is that of the decode server, which serves alone as well. They are stopped between
    runs, because vLLM's threads spin.
    """

    servers: list[subprocess.Popen[bytes]]  # and the proxy
    url: str
    engine_url: str
    strategies: Sequence[str] = field(default=("1P1D",))

    async def run(self, strategy: str, requests: Sequence[LoadRequest]) -> list[Outcome]:
        assert strategy in self.strategies
        client = HttpClient(self.url, connect_timeout_s=CONNECT_S)
        try:
            with running(*self.servers):
                return await open_loop(Target(client, "peer", GREEDY), iter(requests))
        finally:
            client.close()

    def cpu_s(self) -> float:
        return sum(tree_cpu_s(server.pid) for server in self.servers) + cpu_s(os.getpid())


@contextmanager
def nixl_arm(model: str, dtype: str, context: int, *flags: str) -> Iterator[Nixl]:
    """Run the two servers and the proxy. `flags` go to the servers.

    There are two cores at least.
    """
    folder = model_folder(model)
    cores = sorted(os.sched_getaffinity(0))
    ports = [free_port() for _ in cores[:2]]
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def server(number: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        command = serve(folder, ports[number], context, dtype)
        command += ["--kv-transfer-config", json.dumps(CONNECTOR), *flags]
        env = environment() | {
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[number]),
            "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        return stopped_server(command, urls[number], env=env, within_s=START_S)

    with ExitStack() as stack, ThreadPoolExecutor(2) as starts:  # each compiles on its core
        servers = list(starts.map(lambda number: stack.enter_context(server(number)), range(2)))
        port = free_port()
        proxy = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "bench.nixl_proxy", str(port), *urls]
        servers.append(
            stack.enter_context(stopped_server(command, proxy, env=os.environ, within_s=START_S))
        )
        yield Nixl(servers, proxy, urls[1])
