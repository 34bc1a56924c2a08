from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kv_helpers import small_layout

from kvcache.errors import BadRequest
from kvcache.memory.layout import KVLayout
from kvcache.tiers.disk_store import DiskStore
from kvcache.tiers.store import DevicePages, HostStore, TierStore, page_shape
from kvcache.types import PageId

LAYOUT = small_layout(3)


def filled(value: int) -> torch.Tensor:
    return torch.full(page_shape(LAYOUT), value, dtype=torch.uint8)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(LAYOUT, 4, tmp_path)
    yield store
    store.close()


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, disk: DiskStore) -> TierStore:
    return HostStore(LAYOUT, 4) if request.param == "host" else disk


def test_each_slot_keeps_its_page(store: TierStore):
    for slot in (3, 1, 2, 4, 1):
        store.buffer(PageId(slot)).copy_(filled(slot + 40))
        store.flush(PageId(slot))
    for slot in (1, 2, 3, 4):
        assert torch.equal(store.fetch(PageId(slot)), filled(slot + 40))


def test_a_page_survives_a_round_trip(store: TierStore):
    """For every dtype, only this page is written."""
    for dtype in (torch.float32, torch.bfloat16):
        layout = KVLayout(2, 4, 4, 2, 8 if dtype == torch.float32 else 16, dtype)
        pool = torch.randn(layout.shape).to(dtype)
        before = pool.clone()
        device = DevicePages(pool)
        device.read(PageId(2), store.buffer(PageId(1)))
        store.flush(PageId(1))
        device.write(PageId(3), store.fetch(PageId(1)))
        assert torch.equal(pool[:, 3], before[:, 2])
        assert torch.equal(pool[:, :3], before[:, :3])


def test_the_pool_is_not_copied():
    pool = torch.zeros(LAYOUT.shape)
    assert DevicePages(pool)._pool.data_ptr() == pool.data_ptr()


def test_the_file_is_private_and_unlinked(disk: DiskStore, tmp_path: Path):
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(disk.fd)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_nlink == 0
    assert found.st_size == 4 * LAYOUT.page_bytes
    assert found.st_blocks * 512 >= found.st_size


def test_a_closed_store_is_gone(tmp_path: Path):
    store = DiskStore(LAYOUT, 4, tmp_path)
    store.close()
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(store.fd)


@pytest.mark.parametrize("byte", [0, 777, LAYOUT.page_bytes - 1])
def test_a_damaged_page_is_an_error(disk: DiskStore, byte: int):
    """Damage the file through the descriptor table, as another program or a bad disk would."""
    for slot in (1, 2):
        disk.buffer(PageId(slot)).copy_(filled(slot))
        disk.flush(PageId(slot))
    with Path(f"/proc/self/fd/{disk.fd}").open("r+b") as file:
        file.seek(LAYOUT.page_bytes + byte)
        file.write(b"\x55")
    with pytest.raises(OSError, match="does not match its checksum"):
        disk.fetch(PageId(2))
    assert torch.equal(disk.fetch(PageId(1)), filled(1))


def test_a_truncated_page_is_an_error(disk: DiskStore):
    disk.buffer(PageId(4)).copy_(filled(0))
    disk.flush(PageId(4))
    os.truncate(f"/proc/self/fd/{disk.fd}", 4 * LAYOUT.page_bytes - 1)
    with pytest.raises(OSError, match="does not match its checksum"):
        disk.fetch(PageId(4))


def test_an_unwritten_slot_is_an_error(disk: DiskStore):
    with pytest.raises(OSError, match="does not match its checksum"):
        disk.fetch(PageId(1))


FULL = """
import errno, resource, sys
sys.path.insert(0, "tests/kvcache")
from pathlib import Path
from kv_helpers import small_layout
from kvcache.tiers.disk_store import DiskStore

layout = small_layout(3)
store = DiskStore(layout, 4, Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * layout.page_bytes + 1,) * 2)
for slot in (1, 2):
    store.buffer(slot).fill_(slot)
    store.flush(slot)
for slot in (3, 4):  # in part, and not at all
    try:
        store.flush(slot)
    except OSError as error:
        print(errno.errorcode[error.errno])
    try:
        store.fetch(slot)
    except OSError as error:
        print(errno.errorcode[error.errno])
print(int(store.fetch(2)[0, 0]))
try:
    DiskStore(layout, 4, Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_full_disk_is_an_error_of_the_page(tmp_path: Path):
    """A real size limit, in a separate process: writes beyond it fail as on a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[:5] == ["ENOSPC", "EIO", "EFBIG", "EIO", "2"], done.stderr
    assert lines[5].startswith("BadRequest") and "no room for 4 pages" in lines[5]


def test_a_missing_folder_is_refused(tmp_path: Path):
    with pytest.raises(BadRequest, match="No such file"):
        DiskStore(LAYOUT, 4, tmp_path / "nowhere")
    with pytest.raises(BadRequest, match="no room"):
        DiskStore(LAYOUT, 1 << 50, tmp_path)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_a_file_system_without_unnamed_files_gets_one_that_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    monkeypatch.setattr(os, "open", without_unnamed_files(code))
    store = DiskStore(LAYOUT, 4, tmp_path)
    monkeypatch.undo()
    found = os.fstat(store.fd)
    assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
    assert list(tmp_path.iterdir()) == []
    store.buffer(PageId(1)).copy_(filled(7))
    store.flush(PageId(1))
    assert torch.equal(store.fetch(PageId(1)), filled(7))
    store.close()


def test_other_errors_of_the_folder_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "open", without_unnamed_files(errno.EACCES))
    with pytest.raises(BadRequest, match="Permission denied"):
        DiskStore(LAYOUT, 4, tmp_path)


def without_unnamed_files(code: int) -> Callable[..., int]:
    """Return an `os.open` that fails for files without a name."""
    usual = os.open

    def open_(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return usual(path, flags, *args, **options)

    return open_


def test_a_page_whose_write_fails_is_lost(disk: DiskStore, monkeypatch: pytest.MonkeyPatch):
    """Also if its slot still holds the page before it."""
    disk.buffer(PageId(1)).copy_(filled(1))
    disk.flush(PageId(1))

    def fails(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "broken")

    disk.buffer(PageId(1)).copy_(filled(2))
    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="broken"):
        disk.flush(PageId(1))
    with pytest.raises(OSError, match="checksum"):
        disk.fetch(PageId(1))


def test_a_page_that_is_written_in_part_is_lost(disk: DiskStore, monkeypatch: pytest.MonkeyPatch):
    """As on a disk that becomes full."""
    usual = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: usual(fd, bytes(data)[:-1], at))
    disk.buffer(PageId(1)).copy_(filled(0))
    with pytest.raises(OSError, match="only a part") as error:
        disk.flush(PageId(1))
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="checksum") as error:
        disk.fetch(PageId(1))
    assert error.value.errno == errno.EIO


def test_a_kept_file_has_room_for_records_and_pages(tmp_path: Path):
    store = DiskStore(LAYOUT, 4, tmp_path, keep="a.kv", fingerprint="f")
    found = os.fstat(store.fd)
    assert found.st_size == 2 * 4096 + 4 * LAYOUT.page_bytes
    assert found.st_blocks * 512 >= found.st_size
    assert store.persistent and store.load_prefixes() == []
    store.close()


def test_an_unnamed_file_is_not_persistent(disk: DiskStore):
    assert not disk.persistent and disk.load_prefixes() == []
    host = HostStore(LAYOUT, 4)
    assert not host.persistent and host.load_prefixes() == []


def test_the_descriptor_ends_with_its_store(tmp_path: Path):
    store = DiskStore(LAYOUT, 4, tmp_path)
    fd = store.fd
    assert not os.get_inheritable(fd)
    del store
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_copy_to_or_from_a_gpu_is_ordered_and_complete(monkeypatch: pytest.MonkeyPatch):
    """It waits for the kernels before it; it runs on its own stream, and ends before its call."""
    calls: list[object] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            calls.append(("wait for", other))

        def synchronize(self) -> None:
            calls.append("synchronize")

    @contextmanager
    def stream(used: object) -> Iterator[None]:
        calls.append(used)
        yield
        calls.append("end")

    class Tensor:
        def copy_(self, data: object, *, non_blocking: bool) -> None:
            calls.append(("copy", data, non_blocking))

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "kernels")
    pages = DevicePages(torch.zeros(LAYOUT.shape))
    own = pages._stream = Stream()  # type: ignore[assignment]
    pages._copy(Tensor(), "data")  # type: ignore[arg-type]
    assert calls == [own, ("wait for", "kernels"), ("copy", "data", True), "synchronize", "end"]


def test_nobody_can_give_the_file_a_name(disk: DiskStore, tmp_path: Path):
    through = f"/proc/self/fd/{disk.fd}"
    with pytest.raises(OSError):
        os.link(through, tmp_path / "named", src_dir_fd=disk.fd)  # which follows the link
