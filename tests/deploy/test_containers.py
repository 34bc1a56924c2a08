"""The manifests' containers, started as processes with their arguments and environment, serve."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from deployment_files import arguments, container_of, environment, parsed, pods
from forked import ForkedProcess, run_engine, run_microserve

from engine.protocol import EngineConfig
from router.cli.options import given
from router.supervisor import as_arguments

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SECRETS = {"admin-key": "adm", "engine-key": "eng", "cluster-secret": "5e" * 32, "api-key": "cli"}
PROMPT = list(range(1, 60))


class Pod:
    """The container of a workload, as a process. Ports are free ones, and the model is `mock`."""

    def __init__(self, name: str, address: str, **changes: str) -> None:
        (one,) = [one for one in pods() if one["metadata"]["name"] == name]
        container = container_of(one)
        fields = {"status.podIP": address, "metadata.name": f"{name}-0"}
        variables = environment(container, fields=fields, secrets=SECRETS, changes=changes)
        program, *flags = arguments(container, variables)
        if program == "router":  # as `up` starts it, without the dry run, which takes seconds
            flags += ["--parent-pid", str(os.getpid())]
            self.process = ForkedProcess(run_microserve, program, *flags, **variables)
        else:  # what `microserve engine` executes, forked from a process that has imported torch
            values = parsed([program, *flags], variables)
            model = values.pop("model")
            told = as_arguments(given(EngineConfig, values))
            self.process = ForkedProcess(run_engine, model, *told, **variables)
        self.ready = self.process.line()
        self.url = self.ready.split()[-1]

    def stop(self) -> int:
        self.process.signal(signal.SIGTERM)
        return self.process.wait()


def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Poll until `condition` holds: other processes send no event."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def fleet() -> Iterator[dict[str, Pod]]:
    """A router, an engine that prefills and one that decodes."""
    found = {}
    try:
        found["router"] = router = Pod(
            "microserve-router", "", MICROSERVE_ROUTER_PORT="0",
            MICROSERVE_ROUTER_STRATEGY="prefill_decode",
        )  # fmt: skip
        for role in ("prefill", "decode"):
            found[role] = Pod(
                f"microserve-{role}", "127.0.0.1", MODEL="mock", MICROSERVE_ENGINE_PORT="0",
                MICROSERVE_ENGINE_ROUTER=router.url,
            )  # fmt: skip
        yield found
    finally:
        for pod in found.values():
            pod.process.kill()


def test_a_completion_goes_through_and_engines_leave_in_order(fleet):
    with httpx.Client(base_url=fleet["router"].url, timeout=30) as http:
        client = {"Authorization": "Bearer cli"}
        admin = {"Authorization": "Bearer adm"}

        def engines() -> dict[str, dict]:
            listed = http.get("/admin/engines", headers=admin).json()["engines"]
            return {one["id"]: one for one in listed}

        until(lambda: [one["status"] for one in engines().values()] == ["up", "up"])
        assert {id: one["role"] for id, one in engines().items()} == {
            "microserve-prefill-0": "prefill",
            "microserve-decode-0": "decode",
        }
        body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 401
        reply = http.post("/v1/completions", json=body, headers=client)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 5
        receipt = http.get(f"/admin/requests/{reply.headers['x-request-id']}", headers=admin).json()
        assert receipt["status"] == "done" and not receipt["fallbacks"], receipt
        assert fleet["prefill"].stop() == 0
        until(lambda: list(engines()) == ["microserve-decode-0"])
        assert httpx.get(fleet["decode"].url + "/health").status_code == 200  # as probes ask
        assert httpx.get(fleet["decode"].url + "/microserving/state").status_code == 401
    assert fleet["router"].stop() == 0
