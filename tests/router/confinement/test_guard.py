"""What an uploaded module cannot do in its dry run: outlive it, fill memory, read keys, pass."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from waiting import until

from engine.protocol import BadRequest
from router.confinement import run_confined
from router.dry_run.dry_run_process import dry_run_source

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Leaves a process behind that has lost its parent, session and process group; floods its output;
# writes what looks like a verdict wherever it can; and ends as if all were well.
ESCAPES = """
import fcntl, os
ready, done = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        fcntl.flock(os.open({lock!r}, os.O_RDWR), fcntl.LOCK_EX)
        os.write(done, b"x")
        while True:
            os.write(2, b"noise" * 1000)
    os._exit(0)
os.read(ready, 1)
for _ in range({mebibytes}):
    os.write(2, b"y" * (1 << 20))
for fd in range(1, 30):
    try:
        os.write(fd, b'{{"name": "mine", "requests": 1}}')
    except OSError:
        pass
os._exit(0)
"""
# Tries one thing after the other, and raises what came of it.
PRIES = """
import json, os, pathlib
seen = {{"variables": sorted(os.environ), "environ": 0}}
for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
        seen["environ"] += {mark!r}.encode() in file.read_bytes()
    except OSError:
        pass
try:
    bytearray(6 << 30)
    seen["memory"] = "all"
except MemoryError:
    seen["memory"] = "bounded"
try:
    with open({file!r}, "wb") as file:
        for _ in range(32):
            file.write(bytes(1 << 20))
    seen["file"] = "all"
except OSError:
    seen["file"] = "bounded"
raise ValueError(json.dumps(seen))
"""


def is_free(lock: Path) -> bool:
    """Return whether no process holds the lock."""
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


@pytest.mark.parametrize("namespaces", [True, False])
async def test_no_process_output_or_verdict_outlives_the_dry_run(lock, namespaces):
    source = ESCAPES.format(lock=str(lock), mebibytes=64)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match=r"ended its process \(0\)") as refused:
            await dry_run_source(source, file="mine.py", timeout_s=30, namespaces=namespaces)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert is_free(lock)
    assert len(refused.value.message) < 3000
    assert peak < 16 << 20


async def test_a_dry_run_that_is_cancelled_leaves_no_process(lock):
    endless = ESCAPES.format(lock=str(lock), mebibytes=1 << 30)
    running = asyncio.create_task(dry_run_source(endless, file="mine.py", namespaces=False))
    await until(lambda: not is_free(lock))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_free(lock)


async def test_a_dry_run_ends_with_its_router(lock):
    """The router's end of the pipe closes when it dies."""
    job = {
        "source": ESCAPES.format(lock=str(lock), mebibytes=1 << 30), "name": "", "file": "mine.py",
        "folder": ".", "params": {},
    }  # fmt: skip
    order = {
        "entry": "router.dry_run.worker:try_out", "job": job, "timeout_s": 600, "cpu_s": 600,
        "nice": 0, "namespaces": False, "verdict_bytes": 1 << 16,
    }  # fmt: skip
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "router.confinement.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        guard.stdin.write(json.dumps(order).encode() + b"\n")
        guard.stdin.flush()
        await until(lambda: not is_free(lock))
        guard.stdin.close()
        assert guard.wait(20) == 0
        assert guard.stdout.read() == b""
    assert is_free(lock)


@pytest.mark.parametrize("namespaces", [True, False])
async def test_a_module_sees_no_keys_and_its_resources_are_bounded(
    tmp_path, monkeypatch, namespaces
):
    mark = f"hush-{os.getpid()}"
    for name in ("MICROSERVE_SECRET", "MICROSERVE_ROUTER_ADMIN_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, mark)
    source = PRIES.format(mark=mark, file=str(tmp_path / "large"))
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:  # noqa: ASYNC220
        with pytest.raises(BadRequest, match="ValueError") as refused:
            await dry_run_source(source, file="mine.py", namespaces=namespaces)
        other.communicate(b"\n")
    seen = json.loads(refused.value.message.partition("ValueError: ")[2])
    assert not [name for name in seen["variables"] if "SECRET" in name or "KEY" in name]
    assert not [name for name in seen["variables"] if name.startswith("MICROSERVE")]
    assert (seen["memory"], seen["file"]) == ("bounded", "bounded")
    if namespaces and _namespaces_work():
        assert seen["environ"] == 0


async def test_a_module_that_kills_its_guard_is_refused():
    source = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: pass\n"
    with pytest.raises(BadRequest, match=r"ended its process \(-9\)"):
        await dry_run_source(source, file="mine.py", namespaces=False)


HIDES = """
import os, signal, sys
from router.base import hide_memory
if not os.getuid():
    os.setgid(65534), os.setuid(65534)
ready, done = os.pipe()
child = os.fork()
if not child:
    import ctypes
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # setuid has cleared it
    if sys.argv[1] == "hidden":
        hide_memory()
    os.write(done, b"x")
    signal.pause()
os.read(ready, 1)
try:
    open(f"/proc/{child}/environ", "rb").read()
    print("read")
except PermissionError:
    print("refused")
finally:
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "wanted"), [("shown", "read"), ("hidden", "refused")])
def test_hidden_memory_is_refused_to_processes_of_the_same_user(how, wanted):
    done = subprocess.run(
        [sys.executable, "-c", HIDES, how], stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.stdout.decode().strip() == wanted, done.stderr


def _namespaces_work() -> bool:
    source = "from router.base import enter_namespaces as e; import sys; sys.exit(not e())"
    return subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


async def test_a_result_has_a_bound_that_the_caller_sets():
    job = {"x": "y" * 100_000}
    ended = await run_confined("builtins:str", job, timeout_s=60.0)
    assert (ended.verdict, ended.exitcode) == (None, 0)
    assert ended.tail == "its result has more than 65536 bytes"
    ended = await run_confined("builtins:str", job, timeout_s=60.0, verdict_bytes=1 << 20)
    assert ended.verdict == str(job)
