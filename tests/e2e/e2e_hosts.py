"""Hosts of their own: network and PID namespaces on a bridge. Needs root and `ip`.

Processes of different hosts share no memory and no PIDs, so KV goes over the network. A host can be
killed with all its processes, and cut off in one or both directions.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_deployment import Deployment, Engine
from e2e_wire import Wire, within

ROOT = Path(__file__).parents[2]
KEYS = {"MICROSERVE_ENGINE_API_KEY": "engines", "MICROSERVE_ENGINE_ADMIN_KEY": "admin"}
ADMIN = {"Authorization": "Bearer admin"}
START_S = 240.0
REST_PORT = 8100
KV_PORTS = range(9000, 9064)
_made = count()


class Host:
    """A namespace with one address, and the engine in it."""

    def __init__(self, network: str, number: int, bridge: str) -> None:
        self.name, self.number = f"{bridge}h{number}", number
        self.address, self.gateway = f"{network}.{number}", f"{network}.254"
        self._bridge, self._port = bridge, f"{bridge}p{number}"  # a port of the bridge
        self._wire: Wire | None = None
        self._process: subprocess.Popen[bytes] | None = None
        ip(
            f"netns add {self.name}",
            f"link add {self._port} type veth peer name eth0 netns {self.name}",
            f"link set {self._port} master {bridge} up",
            f"-n {self.name} addr add {self.address}/24 dev eth0",
            f"-n {self.name} link set eth0 up",
            f"-n {self.name} link set lo up",
        )

    def start(self, router: str, log: Path, *flags: str) -> None:
        """Start an engine that registers with the router."""
        command = [
            *("ip", "netns", "exec", self.name),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(sys.executable, "-m", "engine", "tiny", "--threads", "1", "--pool-pages", "2048"),
            *("--host", self.address, "--port", str(REST_PORT), "--engine-id", self.name),
            *("--router", router, "--kv-interface", "eth0", "--kv-host", self.address),
            *("--kv-ports", f"{KV_PORTS[0]}-{KV_PORTS[-1]}", "--verify-puts", "always", *flags),
        ]
        # UCX takes two processes of one kernel for neighbours. What it was told here is of no use.
        inherited = {name: value for name, value in os.environ.items() if name[:4] != "UCX_"}
        environment = {**inherited, **KEYS, "MICROSERVE_SECRET": "secret", "UCX_TLS": "tcp"}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """End all processes at once; returns when they are gone."""
        if self._process is None:
            return
        children = self._children()
        self._process.kill()  # takes its child along, and that one its PID namespace
        self._process.wait()
        while any(map(lives, children)):
            time.sleep(0.02)

    def freeze(self) -> None:
        """Stop the engine's process."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def cut_off(self) -> None:
        """Lose all packets from and to this host."""
        ip(f"link set {self._port} down")

    def lose_sent(self) -> None:
        """Lose the packets that this host sends; others arrive."""
        ip(f"-n {self.name} route replace blackhole {self.gateway.rpartition('.')[0]}.0/25",
           f"-n {self.name} route replace blackhole {self.gateway}")  # fmt: skip

    def squeeze(self, rate: str) -> None:
        """Limit what this host sends; a short queue loses what is too much."""
        command = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 16kb limit 32kb"
        subprocess.run(["ip", "netns", "exec", self.name, *command.split()], check=True)

    def worsen(self, delay_s: float, loss: float) -> Wire:
        """Delay all frames from and to this host, and lose a share of them."""
        wires, end, port = f"{self.name}w", f"{self._bridge}x{self.number}", self._port
        ip(
            f"netns add {wires}",
            f"link set {port} netns {wires}",
            f"-n {wires} link set {port} up",
            f"link add {end} type veth peer name bridged netns {wires}",
            f"-n {wires} link set bridged up",
            f"link set {end} master {self._bridge} up",
        )
        self._wire = Wire(wires, (port, "bridged"), delay_s, loss)
        return self._wire

    def heal(self) -> None:
        """Undo `cut_off`, `lose_sent`, `squeeze` and `worsen`."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
            ip(
                f"-n {self.name}w link set {self._port} netns {os.getpid()}",
                f"link set {self._port} master {self._bridge}",
                f"netns del {self.name}w",
            )
        ip(f"link set {self._port} up")
        for command in (
            f"ip -n {self.name} route flush type blackhole",
            f"ip netns exec {self.name} tc qdisc del dev eth0 root",
        ):
            subprocess.run(command.split(), capture_output=True)

    def state(self) -> dict[str, Any]:
        """Return the engine's state, asked from this host: also while it is cut off."""
        return within(self.name, self.engine.state)

    def listening(self) -> set[tuple[str, int]]:
        """Return the addresses and TCP ports at which something listens on this host."""
        command = ["ip", "netns", "exec", self.name, "ss", "-tlnH"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ends = [line.split()[3].rpartition(":") for line in told.splitlines()]
        return {(address, int(port)) for address, _, port in ends}

    def received_bytes(self) -> int:
        """Return how much the network has brought to this host."""
        return int(Path(f"/sys/class/net/{self._port}/statistics/tx_bytes").read_text())

    @property
    def engine(self) -> Engine:
        """The engine's calls."""
        key = {"Authorization": "Bearer engines"}
        return Engine(self.name, f"http://{self.address}:{REST_PORT}", 0, key)

    def remove(self) -> None:
        self.kill()
        if self._wire is not None:
            self.heal()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._children():
            os.kill(pid, number)

    def _children(self) -> list[int]:
        assert self._process is not None
        try:
            file = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            return [int(pid) for pid in file.read_text().split()]
        except FileNotFoundError:
            return []


def lives(pid: int) -> bool:
    """Return whether a thread of a process has not ended yet, and keeps its sockets open.

    Of a killed process on a busy machine, a thread of the lowest priority ends after seconds.
    """
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(one / "stat").read_text().rpartition(")")[2].split()[0] for one in tasks]
    except (FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task").exists()
    return any(state not in "ZX" for state in states)


def ip(*commands: str) -> None:
    """Run commands of `ip`. Raises `CalledProcessError`."""
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@contextmanager
def hosts(number_of_hosts: int) -> Iterator[list[Host]]:
    """Make hosts; skip the test where that is not possible. At the end nothing is left of them."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("hosts as network namespaces take root, ip and unshare")
    number = os.getpid() % 10**5 * 10 + next(_made) % 10
    bridge, network = f"ms{number}", f"10.213.{number % 250}"
    made: list[Host] = []
    try:
        try:
            ip(
                f"link add {bridge} type bridge",
                f"addr add {network}.254/24 dev {bridge}",
                f"link set {bridge} up",
            )
            made.extend(Host(network, each + 1, bridge) for each in range(number_of_hosts))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")
        yield made
    finally:
        for host in made:
            host.remove()
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


@contextmanager
def fleet(made: list[Host], folder: Path, *flags: str) -> Iterator[Deployment]:
    """Start a router here and an engine on each host."""
    gateway = made[0].gateway
    log = (folder / "router.log").open("wb")
    router = subprocess.Popen(
        [
            *(sys.executable, "-m", "router", "router", "--host", gateway, "--port", "8000"),
            *("--strategy", "data_parallel", *flags),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "MICROSERVE_ROUTER_ADMIN_KEY": "admin",
            "MICROSERVE_ROUTER_ENGINE_API_KEY": "engines",
            "MICROSERVE_ROUTER_API_KEY": "clients",
        },
        stdout=log,
        stderr=log,
    )
    url = f"http://{gateway}:8000"
    deployment = Deployment(url, router.pid, [host.engine for host in made], ADMIN)
    try:
        for host in made:
            host.start(url, folder / f"{host.name}.log")
        wait_for(deployment, len(made), folder)
        yield deployment
    finally:
        router.terminate()
        router.wait(30)
        log.close()


def wait_for(deployment: Deployment, count: int, folder: Path) -> None:
    """Wait until the router has so many healthy engines."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            engines = deployment.members()
            if sum(each["status"] == "up" for each in engines) == count:
                return
        except (httpx.HTTPError, json.JSONDecodeError, KeyError):
            engines = []
        if time.monotonic() > deadline:
            logs = "\n".join(file.read_text() for file in folder.glob("*.log"))
            raise AssertionError(f"{engines}\n{logs}")
        time.sleep(0.1)
