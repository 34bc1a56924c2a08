"""A fleet on a real Ray cluster of several nodes on this machine, as its user handles it.

The cluster and the fleet are started once. Each test finds two engines and one router there, and
leaves as many.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from load_on import Load
from ray_cluster import PATIENCE_S, RayCluster, complete, processes

from router.base import child_environment, module_command
from router.ray_fleet import RayFleet

pytestmark = [
    pytest.mark.ray,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(900, func_only=True),
]


@pytest.fixture(scope="module")
def started(on: RayCluster) -> Iterator[str]:
    said = on.run("up", "mock", "--engines", "2", "--port", "0", "--detach", "--step-ms", "10")
    yield said
    RayFleet(on.ray, "default").down(lambda _: None)


@pytest.fixture
def url(started: str) -> str:
    found = re.search(r"^ready (http://\S+)$", started, re.M)
    assert found, started
    return found[1]


def test_it_starts_on_several_nodes_and_answers(on: RayCluster, started: str, url: str):
    assert started.count(" ready http://") == 3
    assert complete(url) == 5
    members = on.until_ready()
    assert members["engine-0"]["node"] != members["engine-1"]["node"]  # SPREAD
    table = on.run("status")
    assert re.search(r"engine-1 +any +\S+ \S+ +ready +0 +http://", table), table
    assert "2 engines, 1 routers, 3 of 3 ready" in table
    targets = json.loads(on.run("status", "--targets"))
    for target in targets:
        text = httpx.get(f"http://{target['targets'][0]}/metrics", trust_env=False).text
        assert "# HELP" in text


def test_keys_are_not_among_the_arguments_and_engines_ask_for_them(on: RayCluster, started: str):
    said = json.loads(on.run("status", "--json"))
    engine = next(one for one in said["members"] if one["kind"] == "engine")
    refused = httpx.get(f"{engine['url']}/microserving/state", trust_env=False)
    assert refused.status_code == 401
    for word in ("engine", "router"):
        for pid in processes(word):
            arguments = Path(f"/proc/{pid}/cmdline").read_text()
            assert said["engine_api_key"] not in arguments
            assert said["admin_key"] not in arguments


def test_it_is_handled_from_outside_of_the_cluster_too(on: RayCluster, started: str):
    assert "2 engines, 1 routers, 3 of 3 ready" in on.run("status", at=on.outside)
    assert "nothing to change" in on.run("scale", "--engines", "2", at=on.outside)


def test_auto_is_the_cluster_of_ray_address(on: RayCluster, started: str):
    said = on.run("status", at="auto", RAY_ADDRESS=on.cluster.address)
    assert "2 engines, 1 routers, 3 of 3 ready" in said
    said = on.run("status", at="auto", RAY_ADDRESS="127.0.0.1:1", code=1)
    assert "no Ray cluster at auto" in said


def test_engines_that_need_a_gpu_are_on_the_node_that_has_one(on: RayCluster):
    """Started from outside, too. The GPU is one of Ray's bookkeeping only."""
    node = on.add_node(num_cpus=1, num_gpus=1)
    try:
        said = on.run("up", "mock", "--fleet", "gpus", "--engines", "1", "--num-gpus", "1",
                      "--num-cpus", "0.5", "--router-cpus", "0.5", "--port", "0", "--detach",
                      at=on.outside)  # fmt: skip
        found = re.search(r"^engine-0 ready \S+ \(node (\w+) ", said, re.M)
        assert found and node.node_id.startswith(found[1]), said
        assert complete(re.search(r"^ready (http://\S+)$", said, re.M)[1]) == 5
        said = on.run("scale", "--fleet", "gpus", "--engines", "2", "--wait", "8", code=1)
        assert "no room for" in said and "GPU" in said
    finally:
        RayFleet(on.ray, "gpus").down(lambda _: None)
        on.cluster.remove_node(node)


def test_what_a_member_logs_is_among_rays_logs(on: RayCluster, started: str):
    line = f"engine-0 ready {on.until_ready()['engine-0']['url']}"
    logs = Path(on.cluster.head_node.get_logs_dir_path())  # of all nodes, on this machine
    assert len([log for log in logs.glob("worker-*.out") if line in log.read_text()]) == 1


def test_figures_of_members_are_among_rays_metrics(on: RayCluster, started: str):
    addresses = {
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in on.ray.nodes() if node["Alive"]
    }  # fmt: skip
    give_up = time.monotonic() + PATIENCE_S
    missing = {"engine-0", "engine-1", "router-0"}
    while missing:
        assert time.monotonic() < give_up, (missing, addresses)
        for address in addresses:
            try:
                text = httpx.get(address, trust_env=False).text
            except httpx.HTTPError:
                continue  # the node's agent is still starting
            up = re.findall(r"^ray_microserve_up\{(.*)\} 1\.0$", text, re.M)
            assert all('fleet="default"' in labels for labels in up if 'fleet="gpus"' not in labels)
            missing -= {name for name in missing for labels in up if f'member="{name}"' in labels}
        time.sleep(0.5)


def test_a_second_fleet_of_that_name_is_refused(on: RayCluster, started: str):
    assert "there is a fleet 'default' already" in on.run("up", "mock", code=1)
    on.until_ready()


def test_an_engine_process_that_is_killed_is_restarted(on: RayCluster, url: str):
    before = on.until_ready()["engine-0"]
    with Load(url) as load:
        os.kill(before["pid"], signal.SIGKILL)
        on.until(lambda members: members["engine-0"]["restarts"] > before["restarts"])
        after = on.until_ready()["engine-0"]
    assert load.failures == []
    assert load.done
    assert (after["url"], after["node"]) == (before["url"], before["node"])


def test_an_actor_that_is_killed_is_restarted_and_leaves_no_orphan(on: RayCluster, url: str):
    before = on.until_ready()["engine-1"]
    parent = int(Path(f"/proc/{before['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    with Load(url) as load:
        os.kill(parent, signal.SIGKILL)
        on.until(lambda members: members["engine-1"]["restarts"] > before["restarts"])
        on.until_ready()
    assert load.failures == []
    assert before["pid"] not in processes("engine")
    assert len(processes("engine")) == 2


def test_a_router_process_that_is_killed_is_restarted_at_its_address(on: RayCluster, url: str):
    before = on.until_ready()["router-0"]
    os.kill(before["pid"], signal.SIGKILL)
    on.until(lambda members: members["router-0"]["restarts"] > before["restarts"])
    assert on.until_ready()["router-0"]["url"] == before["url"] == url
    assert complete(url) == 5


def test_it_scales_up_and_down_under_load(on: RayCluster, url: str):
    on.until_ready()
    with Load(url) as load:
        said = on.run("scale", "--engines", "1", "--prefill", "1", "--decode", "1")
        members = on.until_ready(3)
        assert sorted(one["role"] for one in members.values()) == [
            "any",
            "any",
            "decode",
            "prefill",
        ]
        assert "removed" in said
        at = load.done
        while load.done < at + 20:
            time.sleep(0.1)
        on.run("scale", "--engines", "2", "--prefill", "0", "--decode", "0")
        on.until_ready(2)
    assert load.failures == []
    assert len(processes("engine")) == 2
    assert "nothing to change" in on.run("scale", "--engines", "2")


class Streams:
    """Clients that each ask for one long answer after the other, and note the answers' ids."""

    def __init__(self, url: str, clients: int, tokens: int = 1000) -> None:
        self._url, self._tokens = f"{url}/v1/completions", tokens
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._running = [self._pool.submit(self._run) for _ in range(clients)]

    def end(self) -> list[str]:
        """Return the ids once the running answers have ended. Raises what was wrong with one."""
        self._over.set()
        with self._pool:
            return [id for one in self._running for id in one.result(PATIENCE_S)]

    def _run(self) -> list[str]:
        body = {"model": "mock", "prompt": "a b c", "max_tokens": self._tokens, "stream": True,
                "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
        ids = []
        while not self._over.is_set():
            with httpx.stream(
                "POST", self._url, json=body, timeout=PATIENCE_S, trust_env=False
            ) as reply:
                events = [json.loads(line[6:]) for line in reply.iter_lines() if "{" in line]
            assert reply.status_code == 200 and "error" not in events[-1], events[-1]
            assert events[-1]["usage"]["completion_tokens"] == self._tokens
            ids.append(reply.headers["x-request-id"])
        return ids


def test_an_engine_that_scale_removes_is_drained_and_not_lost(on: RayCluster, url: str):
    on.run("scale", "--engines", "3")
    members = on.until_ready(3)
    told = json.loads(on.run("status", "--json"))
    admin = httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {told['admin_key']}"}, trust_env=False,
        timeout=60,
    )  # fmt: skip
    with admin:
        streams = Streams(url, clients=6)
        try:
            give_up = time.monotonic() + PATIENCE_S
            while True:
                listed = admin.get("/admin/engines").json()["engines"]
                if len(listed) == 3 and all((one["state"] or {}).get("running") for one in listed):
                    break
                assert time.monotonic() < give_up, listed
                time.sleep(0.1)
            said = on.run("scale", "--engines", "2")
        finally:
            ids = streams.end()
        (gone,) = members.keys() - on.until_ready(2).keys()
        assert f"{gone} removed" in said
        receipts = [admin.get(f"/admin/requests/{id}").json() for id in ids]
        retries = [retry for receipt in receipts for retry in receipt["retries"]]
        assert retries, "the engine that left ran nothing"
        for retry in retries:
            assert retry["error"]["message"] == "the engine is being drained", retry
            assert not retry["engines"], "an engine counted as lost"


def test_more_than_the_cluster_has_is_refused_and_changes_nothing(on: RayCluster, url: str):
    said = on.run("scale", "--engines", "40", "--wait", "8", code=1)
    assert "no room for" in said and "CPU" in said
    on.until_ready()
    assert complete(url) == 5


def test_a_node_that_is_lost_under_load_fails_nothing_and_its_engine_comes_back(
    on: RayCluster, url: str
):
    def to_lose(members: dict[str, Any]) -> list[str]:
        """Return the engines that are neither on the head nor beside the router."""
        nodes = [node.node_id for node in on.nodes]
        return [
            name for name, one in members.items()
            if one["kind"] == "engine" and one["node"] != members["router-0"]["node"]
            and any(id.startswith(one["node"].split()[0]) for id in nodes)
        ]  # fmt: skip

    members, engines = on.until_ready(), 2
    if not to_lose(members):  # a third one is placed on the node that has none
        engines = 3
        on.run("scale", "--engines", "3")
        members = on.until_ready(3)
    name = to_lose(members)[0]
    lost = members[name]
    with Load(url) as load:
        on.kill_node(lost["node"].split()[0])
        on.until(lambda members: members[name]["state"] != "ready")
        on.nodes.append(on.add_node())
        back = on.until_ready(engines)[name]
        at = load.done
        while load.done < at + 20:
            time.sleep(0.1)
    assert load.failures == []
    assert back["node"] != lost["node"]
    assert back["restarts"] >= 1  # the count begins anew if its actor was on that node
    assert lost["pid"] not in processes("engine")
    assert len(processes("engine")) == engines
    if engines == 3:
        on.run("scale", "--engines", "2")
        on.until_ready()


def test_interrupted_in_the_foreground_it_leaves_nothing(on: RayCluster, tmp_path: Path):
    state = tmp_path / "state.json"
    process = subprocess.Popen(
        module_command(
            "router", "up", "mock", "--on", on.cluster.address, "--fleet", "other",
            "--engines", "1", "--port", "0", "--num-cpus", "0.5", "--router-cpus", "0.5",
            "--state-file", str(state),
        ),
        env=child_environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    for line in process.stdout:
        if line.startswith("ready "):
            break
    while not state.exists():
        time.sleep(0.05)
    written = json.loads(state.read_text())
    assert complete(written["router"]["url"]) == 5
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(60) == 0
    assert "no fleet 'other'" in on.run("status", "--fleet", "other", code=1)
    assert not state.exists()
    pids = {written["router"]["pid"], written["engines"][0]["pid"]}
    assert not pids & (processes("engine") | processes("router"))


def test_a_model_that_does_not_exist_is_told(on: RayCluster):
    said = on.run("up", "/no/such/model", "--fleet", "none", "--engines", "1", "--num-cpus", "0.1",
                  "--router-cpus", "0.1", code=1)  # fmt: skip
    assert "/no/such/model" in said
    assert "no fleet 'none'" in on.run("down", "--fleet", "none", code=1)


def test_down_leaves_nothing(on: RayCluster, started: str):
    said = on.run("down")
    assert "fleet default is gone" in said
    assert not processes("engine")
    assert "no fleet 'default'" in on.run("status", code=1)
    groups = on.ray.util.placement_group_table().values()
    assert {one["state"] for one in groups} <= {"REMOVED"}
    assert on.ray.util.list_named_actors(all_namespaces=True) == []
    total, give_up = on.ray.cluster_resources(), time.monotonic() + PATIENCE_S
    while (free := on.ray.available_resources()).get("CPU") != total["CPU"]:
        assert time.monotonic() < give_up, (free, total)  # nodes tell it now and then
        time.sleep(0.5)


def test_no_cluster_is_one_line(tmp_path: Path):
    ended = subprocess.run(
        [*module_command("router", "status", "--on", "127.0.0.1:1")],
        env={**child_environment(), "HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "no Ray cluster at 127.0.0.1:1" in ended.stderr
    assert "Traceback" not in ended.stderr
