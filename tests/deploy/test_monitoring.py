"""The dashboard and the alerts are valid, and each alert fires when it should."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from alert_cases import CASES, promtool_tests
from monitoring_files import ALERTS, DASHBOARD, PANELS, PROMETHEUS, RULES, metrics_of
from prometheus_server import needs_prometheus, promtool


def test_the_dashboard_is_one_that_grafana_can_draw():
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
            assert metrics_of(target["expr"]), target["expr"]


def test_every_alert_says_what_is_wrong_and_how_bad_it_is():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 20
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert metrics_of(rule["expr"]) or rule["expr"].startswith("up{")


@needs_prometheus
def test_promtool_accepts_the_rules_and_each_alert_fires_when_it_should(tmp_path: Path):
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS)
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    # The jobs for Kubernetes are comments there, and Debian's Prometheus discovers no pods.
    text = (PROMETHEUS / "prometheus.yml").read_text()
    comment = text.partition("# In Kubernetes")[2].partition(":\n#\n")[2]
    jobs = yaml.safe_load(comment.replace("\n#", "\n").removeprefix("#"))
    for found in (jobs, yaml.safe_load(text)["scrape_configs"]):
        assert [one["job_name"] for one in found] == ["microserve-router", "microserve-engine"]
    for job in jobs:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    inside = tmp_path / "prometheus.yml"
    inside.write_text(yaml.safe_dump({"scrape_configs": jobs}))
    promtool("check", "config", inside)
    assert set(CASES) == {rule["alert"] for rule in RULES}
    cases = tmp_path / "alerts.test.yml"
    cases.write_text(yaml.safe_dump(promtool_tests(RULES, str(ALERTS))))
    assert "SUCCESS" in promtool("test", "rules", cases)
