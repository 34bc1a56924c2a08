"""Two engines of one model, for as long as they are measured."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from router.base import child_environment, module_command, root_cause
from router.supervisor import ChildProcess, as_arguments

__all__ = ["two_engines"]


@asynccontextmanager
async def two_engines(
    model: str, flags: Mapping[str, Any], say: Callable[[str], None]
) -> AsyncIterator[tuple[str, str, str]]:
    """Start two engines with the same flags; yield their URLs and their API key.

    Each has half of the memory, and all of the cores: they do not compute at the same time. They
    end with the body. Raises `StartFailed`.
    """
    key = secrets.token_hex(16)
    env = child_environment()
    env.setdefault("MICROSERVE_SECRET", secrets.token_hex(32))
    env["MICROSERVE_ENGINE_API_KEY"] = key
    children = []
    for number in range(2):
        own = {
            **flags, "engine_id": f"profiled-{number}", "port": 0, "memory_share": "0.5",
            "parent_pid": os.getpid(),
        }  # fmt: skip
        argv = module_command("engine", model, *as_arguments(own))
        children.append(ChildProcess(f"engine-{number}", argv, env, to=say))
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                for child in children:
                    await child.start(tasks)
                yield children[0].url, children[1].url, key
            finally:
                for child in children:
                    await child.stop()
    except BaseExceptionGroup as errors:
        raise root_cause(errors) from None
