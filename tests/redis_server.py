"""A real Redis server on a Unix socket, which tests kill and start again."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = [
    pytest.mark.redis,
    pytest.mark.skipif(
        PROGRAM is None, reason="redis-server is not installed (Debian: apt install redis-server)"
    ),
]


class RedisServer:
    """Started by its constructor. `keeps`: writes every change to disk before it answers."""

    def __init__(self, *, keeps: bool = False, password: str = "") -> None:
        self._password = password
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._socket = self._folder / "socket"
        self._keeps = keeps
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        flags = ["--appendonly", "yes", "--appendfsync", "always"] if self._keeps else []
        if self._password:
            flags += ["--requirepass", self._password]
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [
                PROGRAM, "--port", "0", "--unixsocket", str(self._socket), "--save", "",
                "--dir", str(self._folder), *flags,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 20
        while not self._socket.exists():
            assert time.monotonic() < until, "redis-server does not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._socket.unlink(missing_ok=True)

    def start_empty(self) -> None:
        """Start it without what it had written."""
        for written in self._folder.iterdir():
            shutil.rmtree(written)
        self.start()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
