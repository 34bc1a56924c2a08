"""Set-up of all tests.

Hypothesis draws the same examples in every run, so that a passing suite keeps passing. With
`--hypothesis-profile=fuzz` (`make fuzz`) it draws thousands of others.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx._transports.default as httpx_transports
import pytest
from hypothesis import settings
from reaper import Reaper

from engine.kernels.cpu_features import mkl_mode

# A shell ignores SIGINT in background jobs, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tables of commands are as wide as it says; pytest-xdist gives its workers that of a terminal.
os.environ.pop("COLUMNS", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several test processes with a thread per core each would wait for each other's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# As in an engine's process, before the first product.
os.environ.setdefault("MKL_CBWR", mkl_mode())

# Each client reads the certificates of all authorities, which takes 20 times as long as a call.
httpx_transports.create_ssl_context = cache(httpx_transports.create_ssl_context)

# The controller of several test processes measures all of them.
CONTROLS = "PYTEST_XDIST_WORKER" not in os.environ
REAPER = Reaper(measures=CONTROLS)  # children that start from here on end with this process
MEMORY_LIMIT = 10 << 30  # of the whole run, with the processes that the tests start

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("deterministic")


HERE = Path(__file__).parent
DEPLOYMENTS = (HERE / "conformance", HERE / "e2e")  # all of their tests start processes
PEAK = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not _has_gpu():
        pytest.skip("needs a GPU")


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Have torch compute with one thread.

    Threads that wait for each other's cores spin where several engines compute, and for small
    products they cost more time than they save.
    """
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in DEPLOYMENTS):
            item.add_marker(pytest.mark.processes)
    # The files that take longest go first, so that all test processes end at about the same time.
    long = Counter(
        item.path
        for item in items
        for marker in ("processes", "slow")
        if item.get_closest_marker(marker)
    )
    items.sort(key=lambda item: (-long[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of the collector's passes, which it makes long."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that took more memory than CI machines have."""
    if CONTROLS:
        session.config.stash[PEAK] = peak = REAPER.peak_bytes()
        if peak > MEMORY_LIMIT and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    peak = config.stash.get(PEAK, 0)
    over = f", more than {MEMORY_LIMIT / 2**30:g}" if peak > MEMORY_LIMIT else ""
    terminalreporter.write_line(f"memory of all processes: {peak / 2**30:.1f} GiB{over}")
