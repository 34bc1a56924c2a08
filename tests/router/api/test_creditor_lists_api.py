"""A router tells an engine that borrows whom to ask; all are real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_process import EngineProcess
from waiting import until

pytestmark = pytest.mark.processes


@pytest.fixture
def start() -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def engine(name: str, *flags: str) -> EngineProcess:
        engines.append(EngineProcess("--pool-pages", "64", "--engine-id", name, *flags))
        return engines[-1]

    yield engine
    for each in engines:
        each.kill()


def creditors(engine: EngineProcess) -> list[str]:
    names: list[str] = engine.state()["borrowing"]["creditors"]
    return names


async def test_a_debtor_is_told_its_creditors_and_what_has_changed(start, routed_to):
    a, b = start("a", "--lend-share", "0.5"), start("b", "--lend-share", "1")
    small, other = start("small", "--lend-share", "0.1"), start("plain")
    debtor = start("d", "--borrow", "--lend-share", "0.5", "--max-model-len", "4096")
    engines = [a, b, small, other, debtor]
    async with routed_to([each.url for each in engines], health_interval_s=0.2) as r:
        # Those with most pages first; not itself, and nobody that has no room for a block.
        await until(lambda: creditors(debtor) == ["b", "a"])
        rows = {row["engine"]: row for row in (await r.get("/admin/ledger"))["engines"]}
        assert rows["d"]["borrowed"] == {} and rows["d"]["available"] == 32
        registry = r.server.router.registry
        # Polled once more; its first list may have been shorter.
        await until(lambda: registry["d"].state.borrowing.creditors == ["b", "a"])
        shown: dict[str, Any] = {
            each["id"]: each["state"] for each in (await r.get("/admin/engines"))["engines"]
        }
        assert shown["d"]["borrowing"]["creditors"] == ["b", "a"]
        assert shown["a"]["borrowing"] is None and shown["a"]["lending"]["answers"] == 0
        assert shown["plain"]["lending"] is None
        b.signal(signal.SIGKILL)
        await until(lambda: creditors(debtor) == ["a"])
        debtor.post("lend/creditors", creditors=[])
        assert creditors(debtor) == []
        await until(lambda: creditors(debtor) == ["a"])  # told again, although nothing changed
    found = debtor.http.get("/metrics").text
    assert 'microserve:pages_borrowed{model_name="tiny"} 0.0' in found
    assert 'microserve:debtors{model_name="tiny"} 0.0' in found
    code, log = debtor.stop()
    assert code == 0 and "Traceback" not in log
