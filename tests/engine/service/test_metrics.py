"""An engine's metrics have vLLM's names, types and labels, so that its dashboards work."""

from __future__ import annotations

import pytest
from engine_process import EngineProcess
from prometheus_client.parser import text_string_to_metric_families

VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
}


@pytest.mark.processes
def test_metrics_have_vllms_names_and_count():
    engine = EngineProcess("--step-ms", "0", "--prefill-tokens-per-ms", "0", model="mock")
    try:
        for _ in range(2):
            engine.generate(list(range(40)), max_tokens=5)
        families = {
            family.name: family
            for family in text_string_to_metric_families(engine.http.get("/metrics").text)
        }
        assert {name: families[name].type for name in VLLM} == VLLM
        values = {
            sample.name: sample.value
            for name in VLLM
            for sample in families[name].samples
            if sample.labels["model_name"] == "mock"
        }
        assert values["vllm:prefix_cache_queries_total"] == 80
        assert values["vllm:prefix_cache_hits_total"] == 32
        assert values["vllm:generation_tokens_total"] == 10
        assert values["vllm:request_success_total"] == 2
        assert values["vllm:request_prompt_tokens_sum"] == 80
        assert values["vllm:request_generation_tokens_sum"] == 10
        assert values["vllm:time_to_first_token_seconds_count"] == 2
        assert values["vllm:inter_token_latency_seconds_count"] == 8
        (success,) = [s for s in families["vllm:request_success"].samples if "total" in s.name]
        assert success.labels["finished_reason"] == "length"
    finally:
        engine.kill()


@pytest.mark.parametrize(
    "flags",
    [
        ("--labels", "zone"),
        ("--tls-cert", "x"),
        (
            "--host",
            "0.0.0.0",
            "--api-key",
            "k",
            "--router",
            "http://r",
        ),  # a router could not reach it
    ],
)
def test_contradictory_flags_are_refused(flags, capsys):
    from engine.flags import parse_flags

    with pytest.raises(SystemExit) as ended:
        parse_flags(["mock", *flags])
    assert ended.value.code == 2
    assert "--" in capsys.readouterr().err
