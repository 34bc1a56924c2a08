"""The files of a model, read by a process of their own."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from waiting import until

from engine.protocol import BadRequest
from router.model import read_model_files

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def test_an_alias():
    files = await read_model_files("tiny")
    assert (files.vocab_size, files.eos_token, files.context_length) == (512, "<|im_end|>", 8192)


async def test_a_model_that_is_not_there():
    with pytest.raises(BadRequest, match="neither an alias"):
        await read_model_files("no-such-model")


async def test_a_call_that_is_given_up_leaves_no_process():
    before = set(psutil.Process().children())
    reading = asyncio.create_task(read_model_files("tiny"))
    await until(lambda: set(psutil.Process().children()) - before)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not set(psutil.Process().children()) - before
