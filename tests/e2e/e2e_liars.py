"""Lying engines in a real deployment: processes of `lying_engine.py` that join its fleet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from e2e_deployment import Deployment

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS))

from lying_engine import SILENT  # noqa: E402  its folder is no package

__all__ = ["SILENT", "liar"]


@contextmanager
def liar(deployment: Deployment, lie: str) -> Iterator[None]:
    """An engine that tells `lie` is in the fleet while the body runs."""
    like = deployment.engines[0]
    key = like.headers["Authorization"].removeprefix("Bearer ")
    script = [sys.executable, str(TESTS / "lying_engine.py"), "--lie", lie]
    with subprocess.Popen(
        [*script, "--like", like.url, "--like-key", key], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            engines, admin = f"{deployment.url}/admin/engines", deployment.admin
            body = {"url": url, "id": "liar"}
            httpx.post(engines, json=body, headers=admin, timeout=30).raise_for_status()
            yield
            httpx.delete(f"{engines}/liar", headers=admin, timeout=30)
        finally:
            process.kill()
