"""`GET /admin/ledger` in front of a real engine that lends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engine_process import EngineProcess
from waiting import until

from router.strategy.definition import strategy

pytestmark = pytest.mark.processes


@pytest.fixture
def creditor() -> Iterator[EngineProcess]:
    engine = EngineProcess(
        "--pool-pages", "40", "--lend-share", "0.5", "--lease-ms", "60000", "--engine-id", "c"
    )
    yield engine
    engine.kill()


async def test_the_ledger_shows_loans_soon_and_a_killed_engine_no_longer(creditor, routed_to):
    seen: list[int] = []

    @strategy
    async def looks(request, cluster):
        """Note what the only engine would lend."""
        engine = next(iter(cluster.engines))
        seen.append(engine.lendable)
        async for chunk in engine.start_generate(request):
            yield chunk

    async with routed_to([creditor.url], health_interval_s=0.5) as r:
        (row,) = (await r.get("/admin/ledger"))["engines"]
        assert (row["engine"], row["available"], row["lent"], row["borrowed"]) == ("c", 20, {}, {})
        assert row["fresh"] and row["epoch"] == creditor.state()["epoch"]
        fields = {"debtor": "d", "epoch": 1, "creditor_epoch": row["epoch"]}
        reply = await asyncio.to_thread(
            creditor.post, "lend/allocate", **fields, lease_id="1", size=6
        )
        assert reply.json()["granted"]
        ledger = r.server.router.registry.ledger
        await until(lambda: ledger.describe()[0]["lent"] == {"d": 6})
        (row,) = (await r.get("/admin/ledger"))["engines"]
        assert (row["available"], row["lent"]) == (14, {"d": 6})
        (told,) = (await r.get("/admin/engines"))["engines"]
        assert told["state"]["pages"]["lent"] == 6
        async with r.http.get(r.server.url + "/metrics") as page:
            assert 'ledger_lent{engine="c"} 6.0' in await page.text()
        r.use(looks)
        status, _ = await r.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1})
        assert status == 200 and seen == [14]
        creditor.kill()
        await until(lambda: not ledger.describe())
        assert (await r.get("/admin/ledger"))["engines"] == []
