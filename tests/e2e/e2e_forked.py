"""Deployments whose processes are forked: they start in a fraction of the time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from e2e_deployment import Deployment, Engine
from e2e_faults import Router
from engine_process import EngineProcess


@contextmanager
def forked(model: str, *flags: str, roles: Sequence[str]) -> Iterator[Deployment]:
    """Run an engine for each role and a router: the processes of `up`, but not `up` itself.

    Nothing restarts them. At the end every engine must be at rest.
    """
    key, names = "of-the-engines", [f"engine-{number}" for number in range(len(roles))]
    with ExitStack() as stack:
        running = []
        for name, role in zip(names, roles, strict=True):
            own = ("--role", role, "--engine-id", name, *flags)
            running.append(EngineProcess(*own, model=model, MICROSERVE_ENGINE_API_KEY=key))
            stack.callback(running[-1].kill)
        router = Router(running, strategy="data_parallel", MICROSERVE_ROUTER_ENGINE_API_KEY=key)
        stack.callback(router.kill)
        headers = {"Authorization": f"Bearer {key}"}
        engines = [
            Engine(name, engine.url, engine.pid, headers)
            for name, engine in zip(names, running, strict=True)
        ]
        deployment = Deployment(router.url, router.pid, engines, admin={})
        yield deployment
        for engine in deployment.engines:
            engine.check_at_rest()
