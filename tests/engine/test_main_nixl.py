"""Two engines at different addresses with `--transport nixl` give the same tokens as one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
from engine_process import ROOT, EngineProcess

pytestmark = pytest.mark.processes

PACKAGES = ("nixl_cu12", "nixl_cu13")
PROMPT = [(11 * n) % 250 for n in range(200)]

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(package) for package in PACKAGES),
    reason="NIXL is not installed: pip install -e '.[nixl]'",
)


@pytest.fixture
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    started = []
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            started.append(EngineProcess("--transport", "nixl", "--host", host))
        yield started[0], started[1]
    finally:
        for engine in started:
            engine.kill()


@needs_nixl
@pytest.mark.slow
def test_kv_is_sent_between_two_addresses(pair: tuple[EngineProcess, EngineProcess]):
    sender, receiver = pair
    lease = receiver.post("prep_recv", request_id="r", prompt=PROMPT, end=199).json()
    assert lease["match_len"] == 0
    sent = sender.post(
        "remote_send",
        request_id="r",
        prompt=PROMPT,
        begin=0,
        end=199,
        kv_addr=lease["kv_addr"],
    )
    assert sent.status_code == 200, sent.text
    assert sent.json()["computed_tokens"] == 199
    got = receiver.generate(PROMPT, request_id="r", begin=199, lease_id=lease["lease_id"])
    wanted = sender.generate(PROMPT)
    assert tokens(got) == tokens(wanted) != []
    for engine in pair:
        engine.at_rest()
        code, log = engine.stop()
        assert code == 0, log
        assert "Traceback" not in log


def tokens(emitted: list[dict[str, object]]) -> list[int]:
    return [token for event in emitted for token in event.get("token_ids", [])]  # type: ignore[attr-defined]


def test_without_the_library_the_error_names_the_package_to_install():
    """NIXL is loaded on first use, and an engine without it works."""
    hide = (
        "import sys; sys.modules.update({name: None for name in ('nixl_cu12', 'nixl_cu13')});"
        "from engine.main import main;"
        "sys.exit(main(['tiny', '--port', '0', '--transport', 'nixl']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install -e '.[nixl]'" in done.stderr
    assert "Traceback" not in done.stderr
