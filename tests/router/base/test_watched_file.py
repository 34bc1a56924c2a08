"""Files that are read again when they change, and the format of the engines file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from waiting import until

from engine.protocol import BadRequest
from router.base.watched_file import WatchedFile
from router.engines.engines_file import EngineEntry, engine_url, parse_engines


def number(text: str) -> int:
    if not text.strip().isdigit():
        raise BadRequest("no number")
    return int(text)


async def test_changes_are_reported_and_bad_contents_keep_the_old_value(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("1")
    file, told = WatchedFile(path, number), []
    assert file.value == 1
    watching = asyncio.create_task(file.watch(0.002, told.append))
    with caplog.at_level(logging.WARNING, "router.base.watched_file"):
        path.write_text("x")
        await until(lambda: file.trouble)
        assert (file.value, told) == (1, [])
        path.unlink()
        await until(lambda: "No such file" in file.trouble)
        path.write_bytes(b"\xff")
        await until(lambda: "cannot be read" in file.trouble)
    assert [record.message.partition(":")[0] for record in caplog.records] == [str(path)] * 3
    (tmp_path / "new").write_text("22")
    (tmp_path / "new").rename(path)  # a rename replaces the file, as editors do
    await until(lambda: told)
    assert (file.value, told, file.trouble) == (22, [22], "")
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


@pytest.fixture
async def watched(tmp_path):
    """A file that is read again only when the operating system reports a change."""
    path = tmp_path / "volume" / "file"
    folder = tmp_path / "volume" / "..data"
    (tmp_path / "volume" / "..1").mkdir(parents=True)
    (tmp_path / "volume" / "..1" / "file").write_text("1")
    folder.symlink_to("..1")
    path.symlink_to("..data/file")
    file, told = WatchedFile(path, number), []
    watching = asyncio.create_task(file.watch(60, told.append))
    await asyncio.sleep(0.2)  # time for the watch to begin
    yield path, told
    watching.cancel()
    await asyncio.wait([watching])


async def test_writes_are_reported(watched):
    path, told = watched
    path.write_text("2")
    await until(lambda: told == [2])
    path.unlink()
    path.write_text("3")  # a plain file now
    await until(lambda: told == [2, 3])


async def test_symlinks_of_a_kubernetes_volume_are_followed(watched):
    path, told = watched
    for value in (2, 3):
        new = path.parent / f"..{value}"
        new.mkdir()
        (new / "file").write_text(str(value))
        (path.parent / "..tmp").symlink_to(new.name)
        (path.parent / "..tmp").rename(path.parent / "..data")
        await until(lambda: told[-1:] == [value])  # noqa: B023  awaited at once
    assert told == [2, 3]


async def test_a_folder_that_is_replaced_is_found_again(tmp_path):
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_text("1")
    file, told = WatchedFile(path, number), []
    watching = asyncio.create_task(file.watch(0.05, told.append))
    await asyncio.sleep(0.2)
    path.unlink()
    path.parent.rmdir()
    await until(lambda: file.trouble)
    path.parent.mkdir()
    path.write_text("2")
    await until(lambda: told == [2])
    watching.cancel()
    await asyncio.wait([watching])


def test_the_first_read_must_succeed(tmp_path: Path):
    with pytest.raises(BadRequest, match="absent"):
        WatchedFile(tmp_path / "absent", number)
    (tmp_path / "bad").write_text("x")
    with pytest.raises(BadRequest, match="no number"):
        WatchedFile(tmp_path / "bad", number)


def test_engines_files():
    text = """
    # ours
    http://10.0.0.1:8100/ role=prefill zone=a   # the fast one
    https://engine-2:8100
    """
    assert parse_engines(text) == [
        EngineEntry("http://10.0.0.1:8100", "prefill", {"zone": "a"}),
        EngineEntry("https://engine-2:8100"),
    ]
    for bad, why in (
        ("http://a:1\nhttp://a:1/", "line 2: http://a:1 comes twice"),
        ("engine-1", "line 1: no URL"),
        ("http://a:1 prefill", "not of the form NAME=VALUE"),
        ("http://a:1 role=cook", "no role: 'cook'"),
        ("", "no engine"),
        ("# none", "no engine"),
    ):
        with pytest.raises(BadRequest, match=why):
            parse_engines(bad)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://[", "engine", "http://u:p@a", "http://a?b", "http://a#b"]
)
def test_bad_engine_urls_are_refused(url: str):
    with pytest.raises(BadRequest):
        engine_url(url)
