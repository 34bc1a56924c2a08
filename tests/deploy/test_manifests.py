"""Manifests are valid for all supported versions, and agree with each other and the program."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployment_files import (
    DEPLOY,
    KUBERNETES,
    KUSTOMIZATIONS,
    MANIFESTS,
    NOT_OF_FLAGS,
    PODS,
    ROOT,
    VALUES,
    arguments,
    config_map,
    container_of,
    documents,
    environment,
    literals,
    name_of,
    of_kind,
    parsed,
    pods,
    twins,
)

from router.discovery import parse_services
from router.telemetry import Metrics

VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
OVERLAYS = sorted(path.parent for path in KUSTOMIZATIONS if path.parent.parent.name == "overlays")
KUBECTL = shutil.which("kubectl")
ENGINES = {"any", "prefill", "decode"}
PAGE = (ROOT / "docs/deploy.md").read_text()


@pytest.fixture(autouse=True, scope="module")
def schemas_read_once():
    """The validator reads and parses megabytes of schemas for each object."""
    utils = kubernetes_validate.utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version):
    assert len(documents()) > 15
    for one in documents():
        kubernetes_validate.validate(one, version, strict=True)
    broken = {**documents()[0], "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_the_page_names_the_versions():
    assert f"{VERSIONS[0]} to {VERSIONS[-1]}" in PAGE


@pytest.mark.slow
@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_can_be_built(overlay):
    built = subprocess.run([KUBECTL, "kustomize", overlay], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found: list[Any] = list(yaml.safe_load_all(built.stdout))
    for one in found:
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
    names = {name_of(one) for one in found}
    for one in found:
        if one["kind"] == "HorizontalPodAutoscaler":
            assert f"StatefulSet/{one['spec']['scaleTargetRef']['name']}" in names
        if one["kind"] in PODS:
            for source in container_of(one).get("envFrom", ()):
                assert f"ConfigMap/{source['configMapRef']['name']}" in names
            assert ":" in container_of(one)["image"]
    settings = {k: v for one in found if one["kind"] == "ConfigMap" for k, v in one["data"].items()}
    discovers = bool(settings.get("MICROSERVE_ROUTER_DISCOVER"))
    assert discovers == ("Role/microserve-router" in names)
    assert bool(settings["MICROSERVE_ENGINE_ROUTER"]) != discovers


def test_every_file_is_part_of_a_kustomization():
    used = set()
    for path in KUSTOMIZATIONS:
        made = yaml.safe_load(path.read_text())
        for name in (*made.get("resources", ()), *made.get("components", ())):
            target = (path.parent / name).resolve()
            assert target.exists(), (path, name)
            used.add(target)
    assert used >= set(MANIFESTS)


def test_settings_are_flags_of_the_program():
    named = {name for one in pods() for name in (e["name"] for e in container_of(one)["env"])}
    named |= config_map("microserve-router").keys() | config_map("microserve-engine").keys()
    named |= literals().keys()
    assert {name for name in named if name.startswith("MICROSERVE")} <= twins() | NOT_OF_FLAGS


@pytest.mark.parametrize("one", pods(), ids=name_of)
def test_command_lines_are_understood(one):
    container = container_of(one)
    keys = ("admin-key", "engine-key", "cluster-secret", "api-key", "store")
    given = environment(
        container,
        fields={"status.podIP": "10.1.2.3", "metadata.name": "pod-0"},
        secrets={key: f"redis://{key}" for key in keys},
        changes=literals(),
    )
    values = parsed(arguments(container, given), given)
    (port,) = container["ports"]
    assert values["port"] == port["containerPort"]
    assert values["admin_key"] == "redis://admin-key"
    if (role := one["metadata"]["labels"]["app.kubernetes.io/component"]) in ENGINES:
        assert values["role"] == role and values["host"] == "10.1.2.3"
        assert values["threads"] == int(container["resources"]["requests"]["cpu"])
        assert values["engine_id"] == "pod-0" and values["transport"] == "nixl"
    else:
        assert parse_services(values["discover"]).names


def test_engines_have_their_shared_memory_and_names_of_their_own():
    """`/dev/shm` is memory that counts for the pod, and DNS names each pod of an engine."""
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind("Service")}
    engines = [
        one for one in pods()
        if one["metadata"]["labels"]["app.kubernetes.io/component"] in ENGINES
    ]  # fmt: skip
    assert {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in engines} == ENGINES
    for one in engines:
        (mount,) = [m for m in container_of(one)["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        volumes = {v["name"]: v for v in one["spec"]["template"]["spec"]["volumes"]}
        shared = volumes[mount["name"]]["emptyDir"]
        assert shared["medium"] == "Memory" and shared["sizeLimit"]
        assert one["kind"] == "StatefulSet"
        assert services[one["spec"]["serviceName"]]["clusterIP"] == "None"


@pytest.mark.parametrize("one", pods(), ids=name_of)
def test_the_time_to_stop_suffices(one):
    spec, container = one["spec"]["template"]["spec"], container_of(one)
    settings = config_map(container["envFrom"][0]["configMapRef"]["name"])
    (drain,) = [int(v) for k, v in settings.items() if k.endswith(("_DRAIN_S", "_SHUTDOWN_S"))]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert int(command[1]) + drain + 8 <= spec["terminationGracePeriodSeconds"]


def test_ports_addresses_and_selectors_agree():
    workloads = {one["metadata"]["name"]: one for one in of_kind(*PODS)}

    def selected(selector: dict[str, Any]) -> list[Any]:
        """Return the pods that a selector selects."""
        labels = selector.get("matchLabels", {}).items()
        among = {e["key"]: set(e["values"]) for e in selector.get("matchExpressions", ())}
        return [
            one["spec"]["template"]
            for one in workloads.values()
            if labels <= (of := one["spec"]["template"]["metadata"]["labels"]).items()
            and all(of.get(key) in values for key, values in among.items())
        ]

    def ports(pod: Any) -> dict[str, int]:
        return {
            p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c["ports"]
        }

    for name, one in workloads.items():
        pod = one["spec"]["template"]
        assert (
            pod in selected(one["spec"]["selector"]) and len(selected(one["spec"]["selector"])) == 1
        )
        for spread in pod["spec"].get("topologySpreadConstraints", ()):
            assert selected(spread["labelSelector"]) == [pod]
        for container in pod["spec"]["containers"]:
            for probe in (v for k, v in container.items() if k.endswith("Probe")):
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports(pod)
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            claims = {v["metadata"]["name"] for v in one["spec"].get("volumeClaimTemplates", ())}
            assert mounts == {v["name"] for v in pod["spec"].get("volumes", ())} | claims
        for key, value in pod["metadata"].get("annotations", {}).items():
            assert not key.endswith("/port") or int(value) in ports(pod).values()
        if one["kind"] == "StatefulSet":
            assert any(
                s["metadata"]["name"] == one["spec"]["serviceName"] for s in of_kind("Service")
            )
        assert any(
            selected(b["spec"]["selector"]) == [pod] for b in of_kind("PodDisruptionBudget")
        ) or (name == "microserve-redis")
    for service in of_kind("Service"):
        (pod,) = selected({"matchLabels": service["spec"]["selector"]})
        for port in service["spec"]["ports"]:
            assert port["port"] == ports(pod)[port["targetPort"]]
    for policy in of_kind("NetworkPolicy"):
        guarded = selected(policy["spec"]["podSelector"])
        assert guarded
        for rule in policy["spec"]["ingress"]:
            assert all(
                "port" not in p or p["port"] in ports(pod) for p in rule["ports"] for pod in guarded
            )
            for peer in rule.get("from", ()):
                assert "namespaceSelector" in peer or selected(peer["podSelector"])
    guarded = [p for n in of_kind("NetworkPolicy") for p in selected(n["spec"]["podSelector"])]
    assert len(guarded) == len(workloads)
    services = {one["metadata"]["name"]: one for one in of_kind("Service")}
    url = re.fullmatch(
        r"http://([\w-]+):(\d+)", config_map("microserve-engine")["MICROSERVE_ENGINE_ROUTER"]
    )
    assert url is not None
    assert services[url[1]]["spec"]["ports"][0]["port"] == int(url[2])
    discovered = parse_services(literals()["MICROSERVE_ROUTER_DISCOVER"])
    assert not discovered.namespace and {f"microserve-{role}" for role in ENGINES} == set(
        discovered.names
    )
    assert set(discovered.names) <= services.keys()


def test_pools_differ_in_role_and_size_only():
    texts = {
        re.sub(r"replicas: \d", "replicas: N", path.read_text().replace(path.parent.name, "ROLE"))
        # "any" is a part of other words
        if path.parent.name != "any"
        else re.sub(r"replicas: \d", "replicas: N", re.sub(r"\bany\b", "ROLE", path.read_text()))
        for path in (KUBERNETES / "pools").rglob("engines.yaml")
    }
    assert len(texts) == 1


@pytest.mark.parametrize("one", list(of_kind(*PODS)), ids=name_of)
def test_pods_have_no_rights(one):
    spec, container = one["spec"]["template"]["spec"], container_of(one)
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert spec["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (
        container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    )


def test_routers_may_only_watch_slices():
    (role,) = of_kind("Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    assert not list(of_kind("ClusterRole", "ClusterRoleBinding"))


def test_autoscalers_use_metrics_that_the_router_has():
    told = set(re.findall(r"^(\w+)(?:\{| )", Metrics().render().decode(), re.MULTILINE))
    rules = yaml.safe_load(VALUES.read_text())["rules"]["custom"]
    offered = {re.match(r"\w+", rule["seriesQuery"])[0] for rule in rules}
    used = {
        metric["object"]["metric"]["name"]
        for one in of_kind("HorizontalPodAutoscaler")
        for metric in one["spec"]["metrics"]
    }
    assert used == offered <= told
    for one in of_kind("HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        pool = next(p for p in pods() if p["metadata"]["name"] == target["name"])
        assert pool["kind"] == target["kind"]
        assert one["spec"]["minReplicas"] == pool["spec"]["replicas"]


def test_the_page_creates_the_keys_that_the_pods_need():
    text = "".join(path.read_text() for path in MANIFESTS)
    needed = re.findall(r"secretKeyRef: \{name: microserve-keys, key: ([\w-]+)(, optional)?", text)
    created = set(re.findall(r"--from-literal=([\w-]+)=", PAGE))
    assert created == {key for key, _ in needed}


def test_nothing_else_lies_in_deploy():
    kinds = {".yaml", ".yml", ".json", ".env", ".service", ".example", "", ".dockerignore"}
    files = {path for path in DEPLOY.rglob("*") if path.is_file()}
    files.remove(DEPLOY / "docker/constraints-vllm.txt")
    assert {path.suffix for path in files} <= kinds
