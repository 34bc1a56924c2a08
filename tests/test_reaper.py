"""Processes of a test run end with it, also when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reaper import memory_of

HERE = Path(__file__).parent
# Leaves the test process's session and process group, and loses its parent.
ORPHAN = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)"
TEST = f"""
import subprocess, sys, time
from pathlib import Path

def test_hangs():
    subprocess.run([sys.executable, "-c", {ORPHAN!r}], stdout=subprocess.DEVNULL)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(__file__).with_name("ready").write_text(str(child.pid))
    time.sleep(600)
"""


def running(folder: Path) -> set[int]:
    """Return the living processes that run in `folder`."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.readlink() == folder:
                found.add(int(link.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(TEST)
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
    )
    give_up = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert run.poll() is None and time.monotonic() < give_up
        time.sleep(0.02)
    before = running(tmp_path)
    assert len(before) >= 3  # the run, its child, the orphan
    assert memory_of(before) > 10 << 20
    run.send_signal(signal.SIGKILL)
    run.wait()
    while left := running(tmp_path):
        assert time.monotonic() < give_up, left
        time.sleep(0.02)
