"""Calls into the engine core, and notes from it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import BadAddress, Internal, NoCapacity, error_body
from engine.vllm.core.notes import Notes
from engine.vllm.core_client import CoreClient, NoteReader


class FakeLLM:
    """Answers `collective_rpc` with what the test says."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.calls: list[Any] = []

    async def collective_rpc(self, method: str, timeout: float | None, args: Any) -> list[Any]:
        self.calls.append((method, args))
        if isinstance(self.reply, Exception):
            raise self.reply
        return [self.reply]


async def test_a_call_names_the_method_and_returns_its_reply():
    llm = FakeLLM({"tokens": 3})
    assert await CoreClient(llm).call("pin", prompt=[1]) == {"tokens": 3}
    assert llm.calls == [("microserve_call", ("pin", {"prompt": [1]}))]


async def test_the_core_s_error_is_raised():
    with pytest.raises(BadAddress, match="forged"):
        await CoreClient(FakeLLM(error_body(BadAddress("forged")))).call("open_send")
    busy = {**error_body(NoCapacity("full")), "retry_after_s": 7.0}
    with pytest.raises(NoCapacity) as caught:
        await CoreClient(FakeLLM(busy)).call("prep_recv")
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize("reply", [RuntimeError("dead"), None])
async def test_a_core_that_has_ended_is_an_internal_error(reply: Any):
    with pytest.raises(Internal):
        await CoreClient(FakeLLM(reply)).call("hello")


async def test_notes_arrive_in_order_and_only_from_this_user():
    reader, seen = NoteReader(), []
    done = asyncio.Event()

    def take(note: dict[str, Any]) -> None:
        seen.append(note)
        if note == {"n": 2}:
            done.set()

    async with reader.listening(take):
        folder = Path(reader.path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        notes = Notes(reader.path)
        for number in range(3):
            notes.send({"n": number})
        await asyncio.wait_for(done.wait(), 5)
        notes.close()
    assert seen == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert not folder.exists()


async def test_a_note_that_cannot_be_taken_does_not_end_the_reader():
    reader, seen = NoteReader(), []
    done = asyncio.Event()

    def take(note: dict[str, Any]) -> None:
        if note["n"] == 0:
            raise KeyError("n")
        seen.append(note)
        done.set()

    async with reader.listening(take):
        notes = Notes(reader.path)
        notes.send({"n": 0})
        notes.send({"n": 1})
        await asyncio.wait_for(done.wait(), 5)
        notes.close()
    assert seen == [{"n": 1}]
