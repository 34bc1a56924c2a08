"""The metrics of several processes are those of one."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.telemetry import Metrics, counters, merged, render


def values(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name.removeprefix("microserve_router_"),
            *sorted(sample.labels.values()),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_and_loads_are_added_and_states_are_not():
    parts = [Metrics() for _ in range(3)]
    for number, part in enumerate(parts, start=1):
        part.tokens.inc(number)
        part.first_token.labels("s").observe(0.02 * number)
        part.engine_up.labels("e").set(1)
        part.engine_load.labels("e").set(10)
        part.generation.set(number)
        part.running = number
    parts[0].canaries.labels("promoted").inc()
    told = values(render(merged([part.samples() for part in parts])))
    assert told["generated_tokens_total",] == 6
    assert told["canaries_total", "promoted"] == 1
    assert told["time_to_first_token_seconds_count", "s"] == 3
    assert told["time_to_first_token_seconds_bucket", "0.025", "s"] == 1
    assert round(told["time_to_first_token_seconds_sum", "s"], 6) == 0.12
    assert (told["engine_up", "e"], told["engine_load", "e"]) == (1, 30)
    assert (told["strategy_generation",], told["requests_in_flight",]) == (3, 6)


def test_one_process_is_rendered_as_it_renders_itself():
    metrics = Metrics()
    metrics.answered("/v1/completions", 200)
    metrics.first_token.labels("s").observe(0.02)
    told, own = values(render(metrics.samples())), values(metrics.render())
    assert told.keys() == own.keys()
    of_process = {key for key in own if key[0].startswith("process_")}  # they change meanwhile
    assert all(told[key] == own[key] for key in own.keys() - of_process)


def test_of_an_ended_process_the_counters_remain():
    metrics = Metrics()
    metrics.tokens.inc(5)
    metrics.generation.set(7)
    kept = values(render(counters(metrics.samples())))
    assert kept["generated_tokens_total",] == 5
    assert ("strategy_generation",) not in kept
