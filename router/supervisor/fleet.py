"""`microserve up`: starts, watches and ends engines and a router on this machine.

The router is a child process like the engines. Strategies are user code; whatever they do to the
router, this process can restart it and clean up.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from router.base import AwakeClock, StartFailed, child_environment, module_command
from router.supervisor.child_process import GRACE_S, ChildProcess
from router.supervisor.pools import Pool, engine_processes
from router.supervisor.restarts import Backoff, on_port, watch_health

__all__ = ["Fleet", "FleetConfig", "write_state"]

Say = Callable[[str], None]
ROUTER_KEYS = ("admin_key", "api_key", "engine_api_key", "openai_api_key", "store")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Settings of `up`: the engines of all `pools`, and a router with `router_args`."""

    model: str
    pools: tuple[Pool, ...]
    router_args: tuple[str, ...]
    host: str
    port: int
    admin_key: str = ""
    api_key: str = ""
    engine_api_key: str = ""  # of the engines; empty: a random one
    openai_api_key: str = ""  # of plain OpenAI servers
    store: str = ""  # URL of what the router shares with others; it may have a password
    respawn: bool = True
    health_deadline_s: float = 10.0
    shutdown_s: float = 2.0
    served_model_name: str = ""
    state_file: Path | None = None

    def router_environment(self) -> dict[str, str]:
        """Return the environment of a router's process.

        Keys are in there: every user of the machine can read the arguments.
        """
        keys = {f"MICROSERVE_ROUTER_{name.upper()}": getattr(self, name) for name in ROUTER_KEYS}
        return child_environment() | keys

    def first_request(self, url: str) -> str:
        """Return a command that sends a request to the router at `url`."""
        key = '-H "Authorization: Bearer $API_KEY" ' if self.api_key else ""
        ca = '--cacert "$CA" ' if url.startswith("https:") else ""
        return (
            f"curl {url}/v1/chat/completions {ca}{key}-H 'Content-Type: application/json' -d "
            f'\'{{"model": "{self.served_model_name or self.model}", "temperature": 0, '
            '"messages": [{"role": "user", "content": "What is the capital of France?"}]}\''
        )


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the state file, which only its owner can read: it has keys."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(orjson.dumps(state, option=orjson.OPT_INDENT_2))
    Path(file.name).replace(path)


class Fleet:
    """The processes of one `up`. `say` prints to standard output, `note` to standard error."""

    def __init__(self, config: FleetConfig, *, say: Say, note: Say) -> None:
        engine_key = config.engine_api_key or secrets.token_hex(32)
        self._config = replace(config, engine_api_key=engine_key)
        self._say = say
        self._note = note
        self._awake = AwakeClock(on_stall=self._stalled)
        self._plan = engine_processes(config.pools)
        self._engines: list[ChildProcess] = []
        self._router: ChildProcess | None = None

    async def run(self) -> None:
        """Start everything and run until cancelled, or without respawn until the router ends.

        Raises `StartFailed`. However it exits, all children and their children are gone.
        """
        await self._prepare_model()
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._awake.run())
            try:
                await self._start(tasks)
                self._write_state()
                self._announce()
                await self._watch(tasks)
            finally:
                ticking.cancel()
                await self._stop()

    def kill(self) -> None:
        """Kill all children at once."""
        for child in self._children():
            child.signal(signal.SIGKILL)

    async def _prepare_model(self) -> None:
        """Download the model once, before several engines try to."""
        process = await asyncio.create_subprocess_exec(
            *module_command("engine.models", self._config.model),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            env=child_environment(), start_new_session=True,
        )  # fmt: skip
        try:
            if await process.wait() != 0:
                raise StartFailed(f"the model {self._config.model!r} is not available")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        config = self._config
        self._note(f"loading {config.model} on {len(self._plan)} engines …")
        env = child_environment()
        env.setdefault("MICROSERVE_SECRET", secrets.token_hex(32))
        env["MICROSERVE_ENGINE_API_KEY"] = config.engine_api_key
        for engine in self._plan:
            argv = module_command("engine", config.model, *engine.arguments)
            self._engines.append(ChildProcess(engine.name, argv, env, to=self._note))
        await _together(child.start(tasks) for child in self._engines)
        for child in self._engines:
            self._say(f"{child.name} ready {child.url} (pid {child.pid})")
        urls = []
        for child, engine in zip(self._engines, self._plan, strict=True):
            labels = (f"{name}={value}" for name, value in engine.labels.items())
            urls += ["--engine", " ".join((child.url, *labels))]
        argv = module_command(
            "router", "router", *urls, *config.router_args,
            "--host", config.host, "--port", str(config.port), "--parent-pid", str(os.getpid()),
        )  # fmt: skip
        env = config.router_environment()
        grace_s = GRACE_S + config.shutdown_s
        self._router = ChildProcess("router", argv, env, to=self._note, grace_s=grace_s)
        await self._router.start(tasks)
        self._say(f"router ready {self._router.url} (pid {self._router.pid})")

    def _announce(self) -> None:
        url = self._router.url if self._router else ""
        self._say(f"ready {url}")
        self._say(self._config.first_request(url))

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        async with asyncio.TaskGroup() as watchers:
            for child in self._children():
                watchers.create_task(self._restart_on_exit(child, tasks))
            if self._config.respawn and self._router is not None:
                deadline_s = self._config.health_deadline_s
                watchers.create_task(
                    watch_health(self._router, deadline_s, self._awake, self._note)
                )

    async def _restart_on_exit(self, child: ChildProcess, tasks: asyncio.TaskGroup) -> None:
        """Restart `child` on its own port whenever it ends."""
        backoff = Backoff()
        while True:
            await child.wait()
            if not self._config.respawn:
                self._note(f"{child.name} has ended ({child.ending()})")
                if child is self._router:
                    raise StartFailed(f"the router has ended ({child.ending()})")
                return
            delay = backoff.delay_s()
            self._note(f"{child.name} has ended ({child.ending()}); restarting in {delay:g} s")
            await asyncio.sleep(delay)
            backoff.began()
            child.argv = on_port(child.argv, child.url.rpartition(":")[2])
            url = child.url
            try:
                await child.start(tasks)
            except StartFailed as error:
                child.url = url
                self._note(str(error))
                continue
            self._note(f"{child.name} ready {child.url} (pid {child.pid})")
            self._write_state()

    def _stalled(self, seconds: float) -> None:
        self._note(f"up did not run for {seconds:.1f} s: it was stopped, or the host is overloaded")

    async def _stop(self) -> None:
        """Stop the router first: it ends requests in flight, for which it needs the engines."""
        try:
            if self._router is not None:
                await self._router.stop()
            await _together(child.stop() for child in self._engines)
        finally:
            self.kill()
            if self._config.state_file is not None:
                self._config.state_file.unlink(missing_ok=True)

    def _children(self) -> list[ChildProcess]:
        return [*self._engines, *([self._router] if self._router else [])]

    def _write_state(self) -> None:
        path, router = self._config.state_file, self._router
        if path is None or router is None:
            return
        state = {
            "router": {"url": router.url, "pid": router.pid},
            "engines": [
                {"id": child.name, "url": child.url, "pid": child.pid, "role": engine.role}
                for child, engine in zip(self._engines, self._plan, strict=True)
            ],
            "admin_key": self._config.admin_key or None,
            "engine_api_key": self._config.engine_api_key,
        }
        write_state(path, state)


async def _together(awaitables: Iterable[Any]) -> None:
    """Await all concurrently. The first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for awaitable in awaitables:
                tasks.create_task(awaitable)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
