"""The dashboard and the alerts of deploy/, and the metrics that they ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
ALERTS = PROMETHEUS / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana/microserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
METRIC = re.compile(r"(?<![\w\"=:])((?:microserve|vllm|process)[a-z_:]+)(?=[{\[ )<>=/]|$)", re.M)
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def expression(target: dict[str, Any]) -> str:
    """Return a panel's query with the variables replaced as Grafana does it."""
    text = target["expr"].replace("$__rate_interval", "8s")
    return text.replace("$router", ".*").replace("$engine", ".*").replace("[1h]", "[1m]")


def metrics_of(text: str) -> set[str]:
    """Return the names of the metrics in an expression, without the suffixes of histograms."""
    return {SUFFIX.sub("", name) for name in METRIC.findall(text)}
