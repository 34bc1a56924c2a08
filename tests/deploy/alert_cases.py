"""For each alert, series under which it fires for one instance and not for another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "AlertCase", "promtool_tests"]

R = "microserve_router_"
BOTH = ("bad", "good")  # instances


@dataclass(frozen=True)
class AlertCase:
    """`bad` and `good` are values by series, 15 s apart; `said` is `$value` in the summary."""

    job: str
    bad: Mapping[str, str]
    good: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)  # that the alert has besides
    said: str = ""


def router(bad: Mapping[str, str], good: Mapping[str, str], said: str = "", **labels: str):
    return AlertCase("microserve-router", bad, good, labels, said)


def engine(bad: Mapping[str, str], good: Mapping[str, str], said: str = "", **labels: str):
    return AlertCase("microserve-engine", bad, good, labels, said)


def counts(name: str, more: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """A counter that grows by one in every step, and one that does not."""
    return {name + more: "0+1x200"}, {name + more: "5x200"}


def histogram(name: str, slow: bool) -> dict[str, str]:
    """Ten values a step, all below the second bound, and either none or all below the first."""
    first, second = ("5", "10") if name == "time_to_first_token_seconds" else ("0.1", "0.5")
    return {
        f'{R}{name}_bucket{{le="{first}"}}': "0x200" if slow else "0+10x200",
        f'{R}{name}_bucket{{le="{second}"}}': "0+10x200",
        f'{R}{name}_bucket{{le="+Inf"}}': "0+10x200",
    }


CASES = {
    "MicroserveRouterDown": router({"up": "0x200"}, {"up": "1x200"}),
    "MicroserveNoEngineUp": router(
        {f'{R}engine_up{{engine="a"}}': "0x200", f'{R}engine_up{{engine="b"}}': "0x200"},
        {f'{R}engine_up{{engine="a"}}': "0x200", f'{R}engine_up{{engine="b"}}': "1x200"},
    ),
    "MicroserveEngineDown": router(
        {f'{R}engine_up{{engine="a"}}': "0x200"}, {f'{R}engine_up{{engine="a"}}': "1x200"},
        engine="a",
    ),
    "MicroserveBreakerOpen": router(
        {f'{R}breaker_state{{engine="a"}}': "2x200"}, {f'{R}breaker_state{{engine="a"}}': "1x200"},
        engine="a",
    ),
    "MicroserveRequestsFail": router(
        {f'{R}requests_total{{status="done"}}': "0+3x200",
         f'{R}requests_total{{status="timeout"}}': "0+1x200"},
        {f'{R}requests_total{{status="done"}}': "0+99x200",
         f'{R}requests_total{{status="cancelled"}}': "0+99x200",
         f'{R}requests_total{{status="timeout"}}': "0+1x200"},
        "25%",
    ),
    "MicroserveSlowFirstToken": router(
        histogram("time_to_first_token_seconds", True),
        histogram("time_to_first_token_seconds", False), "9.95s",
    ),
    "MicroserveSlowTokens": router(
        histogram("time_per_output_token_seconds", True),
        histogram("time_per_output_token_seconds", False), "496ms",
    ),
    "MicroserveRequestsWait": router(
        {f"{R}requests_waiting": "40x200"}, {f"{R}requests_waiting": "32x200"}, "40"
    ),
    "MicroserveRetriesDenied": router(*counts(f"{R}retries_denied_total")),
    "MicroserveStrategyOffends": router(
        {f'{R}strategy_offences_total{{strategy="s",generation="2",kind="blocked"}}': "_x140 1x60"},
        {f'{R}strategy_offences_total{{strategy="s",generation="2",kind="blocked"}}': "0x200"},
        strategy="s", generation="2", kind="blocked",
    ),
    "MicroserveCanaryRolledBack": router(
        {f'{R}canaries_total{{decision="rolled_back"}}': "0+1x200"},
        {f'{R}canaries_total{{decision="promoted"}}': "0+1x200"},
        decision="rolled_back",
    ),
    "MicroserveEventLoopStalls": router(*counts(f"{R}event_loop_stalls_total")),
    "MicroserveHostOverloaded": router(
        {f"{R}host_stalled_seconds_total": "0+1x200"},
        {f"{R}host_stalled_seconds_total": "0+0.1x200"},
    ),
    "MicroserveConnectionsRefused": router(*counts(f"{R}connections_refused_total")),
    "MicroservePinCopiesMissing": router(
        {f"{R}pin_copies": "1x200", f"{R}pin_copies_wanted": "2x200"},
        {f"{R}pin_copies": "2x200", f"{R}pin_copies_wanted": "2x200"},
    ),
    "MicroserveEngineUnreachable": engine({"up": "0x200"}, {"up": "1x200"}),
    "MicroserveStepsFail": engine(*counts("microserve:failed_steps_total")),
    "MicroserveKVCacheFull": engine(
        {"vllm:kv_cache_usage_perc": "0.96x200"}, {"vllm:kv_cache_usage_perc": "0.9x200"}
    ),
    "MicroservePreemptions": engine(
        {"vllm:num_preemptions_total": "0+3x200"}, {"vllm:num_preemptions_total": "0+1x200"}
    ),
    "MicroserveLeasesExpire": engine(*counts("microserve:expired_leases_total")),
    "MicroservePagesQuarantined": engine(
        {"microserve:pages_quarantined": "3x200"}, {"microserve:pages_quarantined": "0x200"}, "3"
    ),
    "MicroserveWorkersRestart": engine(*counts("microserve:worker_restarts_total")),
}  # fmt: skip


def promtool_tests(rules: list[dict[str, Any]], alerts: str) -> dict[str, Any]:
    """Return promtool's tests of these rules: each fires for one instance, once it is time."""
    return {
        "rule_files": [alerts],
        "evaluation_interval": "1m",
        "tests": [_tested(rule, CASES[rule["alert"]]) for rule in rules],
    }


def _tested(rule: dict[str, Any], case: AlertCase) -> dict[str, Any]:
    place = {"job": case.job, "instance": "bad"}
    labels = {**place, **case.labels}
    annotations = {
        name: _expanded(text, labels, case.said) for name, text in rule["annotations"].items()
    }
    expected = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}
    name = rule["alert"]
    return {
        "interval": "15s",
        "name": name,
        "input_series": [
            {"series": _placed(series, case.job, instance), "values": values}
            for instance, given in zip(BOTH, (case.bad, case.good), strict=True)
            for series, values in given.items()
        ],
        "alert_rule_test": [
            {"eval_time": "0s", "alertname": name, "exp_alerts": []},
            {"eval_time": "40m", "alertname": name, "exp_alerts": [expected]},
        ],
    }


def _placed(series: str, job: str, instance: str) -> str:
    name, _, labels = series.partition("{")
    own = f'job="{job}",instance="{instance}"'
    return f"{name}{{{own}}}" if not labels else f"{name}{{{own},{labels}"


def _expanded(text: str, labels: Mapping[str, str], said: str) -> str:
    text = re.sub(r"{{ \$value[^}]*}}", said, text)
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
