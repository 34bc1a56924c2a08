"""A real Ray cluster of several nodes on this machine, and the command line that uses it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from router.base import child_environment, module_command
from router.ray_fleet import RayFleet, connect

__all__ = ["PATIENCE_S", "RayCluster", "complete", "processes"]

MEMORY = 80_000_000  # bytes of each node's object store
PATIENCE_S = 300.0  # all nodes share the cores of this machine


class RayCluster:
    """A head and two nodes with two CPUs each, and the command line."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.client_port = probe.getsockname()[1]
        head = {"num_cpus": 2, "object_store_memory": MEMORY, "include_dashboard": False,
                "ray_client_server_port": self.client_port}  # fmt: skip
        for attempt in range(5):  # Ray gives a node 30 s to start, which a busy machine may exceed
            try:
                self.cluster = Cluster(initialize_head=True, head_node_args=head)
                break
            except Exception:
                if attempt == 4:
                    raise
        self.nodes = [self.add_node(), self.add_node()]
        self.ray = connect(self.cluster.address)

    @property
    def outside(self) -> str:
        """The address for Ray Client."""
        return f"ray://127.0.0.1:{self.client_port}"

    def add_node(self, **has: Any) -> Any:
        has = {"num_cpus": 2, "object_store_memory": MEMORY, **has}
        for attempt in range(5):
            try:
                return self.cluster.add_node(**has)
            except Exception:
                if attempt == 4:
                    raise
        raise AssertionError

    def kill_node(self, node_id: str) -> None:
        """End a node's raylet by SIGKILL; its workers end with it."""
        node = next(one for one in self.nodes if one.node_id.startswith(node_id))
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def run(self, *arguments: str, code: int = 0, at: str = "", **env: str) -> str:
        """Run a command and return what it prints."""
        ended = subprocess.run(
            [*module_command("router", *arguments), "--on", at or self.cluster.address],
            env={**child_environment(), **env}, capture_output=True, text=True, timeout=400,
            check=False,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def end(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()

    def status(self, fleet: str = "default") -> dict[str, dict[str, Any]]:
        """Return the members, by name, as the command `status` reads them."""
        lines = RayFleet(self.ray, fleet).lines()
        return {line.member.name: asdict(line) | asdict(line.member) for line in lines}

    def until(
        self, condition: Callable[[dict[str, dict[str, Any]]], bool], fleet: str = "default"
    ) -> dict[str, Any]:
        """Wait until the members fulfil a condition, and return them."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition(members := self.status(fleet)):
            assert time.monotonic() < give_up, members
            time.sleep(0.5)
        return members

    def until_ready(
        self, engines: int = 2, routers: int = 1, fleet: str = "default"
    ) -> dict[str, Any]:
        def ready(members: dict[str, dict[str, Any]]) -> bool:
            states = [one["state"] for one in members.values()]
            return states == ["ready"] * (engines + routers)

        return self.until(ready, fleet)


def processes(word: str) -> set[int]:
    """Return the living processes of this run that have `word` among their arguments."""
    mark = f"TESTS_OWNER={os.environ['TESTS_OWNER']}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in arguments and mark in environment:
            found.add(int(path.name))
    return found


def complete(url: str) -> int:
    body = {"model": "mock", "prompt": "a b c", "max_tokens": 5}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)
    assert reply.status_code == 200, reply.text
    tokens: int = reply.json()["usage"]["completion_tokens"]
    return tokens
