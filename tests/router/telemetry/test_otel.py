"""Traces, exported by OTLP to a collector over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router.telemetry.trace import Untraced, open_tracing

ASK = {"prompt": list(range(1, 41)), "max_tokens": 5, "temperature": 0}
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@asynccontextmanager
async def collecting():
    """Run an OTLP collector; yield its URL and the spans it receives."""
    spans: dict[str, list] = {}

    async def traces(request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    spans.setdefault(span.name, []).append(span)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", spans
    finally:
        await runner.cleanup()


async def test_a_request_is_a_span_with_one_for_each_leg(route, fake, monkeypatch):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    async with collecting() as (url, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "X-Request-Id": "x"}
        async with route(p, d, strategy="prefill_decode") as r:
            assert (await r.post("/v1/completions", ASK, headers=headers))[0] == 200
            receipt = await r.receipt("x")
        async with asyncio.timeout(30):
            while len(spans) < 4:  # noqa: ASYNC110  they may come in several batches
                await asyncio.sleep(0.01)
    (request,) = spans["request"]
    assert request.trace_id.hex() == TRACE_ID
    assert request.parent_span_id.hex() == SPAN_ID
    assert set(spans) == {"request", "prep_recv", "remote_send", "start_generate"}
    legs = sorted(receipt["legs"], key=lambda leg: leg["call"])  # stable: attempts stay in order
    found = [
        span
        for call in sorted(set(spans) - {"request"})
        for span in sorted(spans[call], key=lambda span: span.start_time_unix_nano)
    ]
    # A call has a second leg if the router had to try it again.
    for leg, span in zip(legs, found, strict=True):
        assert span.name == leg["call"]
        assert span.trace_id == request.trace_id
        assert span.parent_span_id == request.span_id
        assert span.start_time_unix_nano >= request.start_time_unix_nano - 5_000_000
        took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert abs(took_ms - leg["ms"]) < 0.01
        attributes = {a.key: a.value.string_value for a in span.attributes}
        assert attributes["microserve.engine"] == leg["engine"]
    # The engines receive the router's span, not its caller's.
    for engine in (p, d):
        assert {h["traceparent"] for h in engine.headers} == {
            f"00-{TRACE_ID}-{request.span_id.hex()}-01"
        }


def test_tracing_is_enabled_by_the_environment_only():
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    for environment in (
        {}, {**endpoint, "OTEL_SDK_DISABLED": "true"}, {**endpoint, "OTEL_TRACES_EXPORTER": "none"},
    ):  # fmt: skip
        assert isinstance(open_tracing(environment), Untraced)


@pytest.mark.processes
def test_the_sdk_is_not_imported_without_tracing():
    """FastAPI imports the API package if it is installed, but neither SDK nor exporter."""
    code = (
        "import sys, router.server; from router.telemetry.trace import open_tracing; "
        "open_tracing({}); "
        "slow = ('opentelemetry.sdk', 'opentelemetry.exporter', 'router.telemetry.otel'); "
        "print([name for name in sys.modules if name.startswith(slow)])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
