"""Memory of the router with 10,000 idle streams.

Purpose: a stream that waits for its next token takes memory for a connection, a task, a suspended
strategy and a receipt. This bench measures it, for sizing a router.

How: two mock engines whose step takes `STEP_MS` each hold half of the streams. Each stream gets its
first token and then stays idle while the bench reads the router's memory (resident set, from
`/proc/PID/stat`). At most `OPENED_PER_S` streams are opened per second. The router serves one
request first, so that what it loads on first use is not counted. Each stream takes a file
descriptor here and one in the router: see `ulimit -n`.

Run: `make bench-router-idle`, or `python -m bench.router_idle [--save]`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from typing import Any

import uvloop

from bench.load import closed_loop, connected, post
from bench.report import only_save, publish, table
from bench.router_peers import Process, deployed

STREAMS = 10_000
STEP_MS = 20_000
SPARE_FILES = 200
OPENED_PER_S = 400
LIMIT_MB = 500


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    streams = min(STREAMS, files - SPARE_FILES)
    with (
        deployed(
            *("--step-ms", str(STEP_MS), "--prefill-tokens-per-ms", "0"),
            *("--max-batch", str(streams), "--token-budget", str(64 * streams)),
            *("--max-waiting", str(streams)),
            peer=False,
        ) as deployment,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        figures = runner.run(measure(deployment.ours, streams))
    rows = [[name, str(value)] for name, value in figures.items()]
    table(f"{streams} streams that wait for their next token", ["what", "value"], rows)
    publish("router_idle", {**figures, "streams": streams, "limit_mb": LIMIT_MB})


async def measure(router: Process, streams: int) -> dict[str, Any]:
    """Open all streams, and read the router's memory when all have begun."""
    one = _request(router, max_tokens=1)
    await closed_loop(router.url, lambda number: one, count=1, connections=1)
    before = router.rss_mb()
    pool = await connected(router.url, streams)
    connected_mb = router.rss_mb()
    request = _request(router, max_tokens=1000)
    waiting = []
    try:
        for connection in pool:  # clients do not connect all at once
            waiting.append(asyncio.ensure_future(connection.ask(request)))
            await asyncio.sleep(1 / OPENED_PER_S)
        give_up = time.monotonic() + 600
        while (begun := sum(connection.begun for connection in pool)) < streams:
            if time.monotonic() > give_up:
                raise SystemExit(f"{begun} of {streams} streams have begun")
            await asyncio.sleep(0.5)
        held = router.rss_mb()
    finally:
        for task in waiting:
            task.cancel()
        for connection in pool:
            connection.close()
    return {
        "idle_rss_mb": round(held, 1),
        "connections_rss_mb": round(connected_mb, 1),
        "empty_rss_mb": round(before, 1),
        "kb_per_stream": round(1e3 * (held - before) / streams, 1),
    }


def _request(router: Process, *, max_tokens: int) -> bytes:
    body = {
        "model": "mock",
        "prompt": "An idle stream, and what it keeps in the router while it waits: 64 bytes",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    return post(router.url, "/v1/completions", json.dumps(body).encode())


if __name__ == "__main__":
    main()
