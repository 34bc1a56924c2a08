"""The files of a model, without weights, for servers that do not describe their model."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import msgspec

from engine.protocol import BadRequest
from router.base import child_environment, module_command

__all__ = ["ModelFiles", "read_model_files"]

REASON = 2000  # characters


class ModelFiles(msgspec.Struct, frozen=True):
    """Tokenizer, chat template and sizes. `context_length` is 0 if the files do not tell it."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    vocab_size: int
    context_length: int


async def read_model_files(name: str) -> ModelFiles:
    """Read the files of a folder, a `.gguf` file, a hub id or an alias; download missing ones.

    Another process does it, since some formats need torch, which no router imports. It ends if
    this call is cancelled. Raises `BadRequest` with the reason if there is no such model.
    """
    process = await asyncio.create_subprocess_exec(
        *module_command("engine.models", "--describe", name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        out, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        said: Any = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise BadRequest(f"the model {name!r}: {''.join(said)[:REASON]}")
    try:
        return msgspec.json.decode(out, type=ModelFiles)
    except msgspec.MsgspecError as wrong:
        raise BadRequest(f"the model {name!r} has no usable description: {wrong}") from None
