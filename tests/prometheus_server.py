"""A real Prometheus that scrapes what it is told, once a second."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

PROGRAM, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None or PROMTOOL is None,
    reason="Prometheus is not installed (Debian: apt install prometheus)",
)


def promtool(*arguments: str | Path) -> str:
    """Run promtool; return what it says. Fails the test if it complains."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class PrometheusServer:
    """Started by its constructor, with its data in `folder`."""

    def __init__(self, folder: Path, jobs: Mapping[str, Sequence[str]], rules: Path) -> None:
        """`jobs`: targets by the name of the job."""
        config = {
            "global": dict.fromkeys(
                ("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s"
            ),
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [*targets]}]}
                for name, targets in jobs.items()
            ],
        }  # fmt: skip
        file, log = folder / "prometheus.yml", folder / "log"
        file.write_text(yaml.safe_dump(config))
        assert PROGRAM is not None
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [
                    PROGRAM, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=said, stderr=said,
            )  # fmt: skip
        until = time.monotonic() + 30
        while not (found := re.search(r'msg="Listening on" address=(\S+)', log.read_text())):
            assert time.monotonic() < until and self._process.poll() is None, log.read_text()
            time.sleep(0.05)
        self.http = httpx.Client(base_url=f"http://{found[1]}/api/v1", timeout=30)

    def get(self, path: str, **params: str) -> Any:
        reply = self.http.get(path, params=params).json()
        assert reply["status"] == "success", reply
        return reply["data"]

    def query(self, expression: str) -> list[float]:
        """Return the values of an instant query, without those that are not numbers."""
        found = self.get("/query", query=expression)["result"]
        values = [float(one["value"][1]) for one in found]
        return [value for value in values if value == value]

    def close(self) -> None:
        self.http.close()
        self._process.kill()
        self._process.wait()
