"""The records of a page file, without the pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvcache.tiers.ledger import Ledger
from kvcache.types import PageId

SIZE, SLOTS = 4, 6
RECORD = 8 + 16 + 16 + 4 * SIZE


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def opened(fd: int, **changes: object) -> Ledger:
    given = {"slots": SLOTS, "page_size": SIZE, "page_bytes": 100, "fingerprint": "same"}
    return Ledger(fd, **{**given, **changes})  # type: ignore[arg-type]


def prefix(*pages: int) -> npt.NDArray[np.int32]:
    """Return tokens of which each page repeats one number."""
    return np.repeat(np.array(pages, dtype=np.int32), SIZE)


def write(ledger: Ledger, slot: int, *pages: int) -> None:
    ledger.write(PageId(slot), prefix(*pages), bytes([slot]) * 16)


def loaded(fd: int) -> tuple[dict[tuple[int, ...], list[int]], dict[int, bytes]]:
    """Return the slots of each prefix, by its pages' numbers, and the checksums."""
    prefixes, sums = opened(fd).load()
    assert all(len(tokens) == SIZE * len(slots) for tokens, slots in prefixes)
    return {tuple(tokens[::SIZE].tolist()): list(slots) for tokens, slots in prefixes}, dict(sums)


@pytest.mark.parametrize(
    ("slots", "page_size", "size"),
    # A record of 6 tokens has 64 bytes.
    [
        (1, 6, 2 * 4096),
        (64, 6, 2 * 4096),
        (65, 6, 3 * 4096),
        (128, 6, 3 * 4096),
        (1, 2048, 4 * 4096),
    ],
)
def test_the_pages_begin_at_the_block_behind_the_records(
    fd: int, slots: int, page_size: int, size: int
):
    assert opened(fd, slots=slots, page_size=page_size).size == size


def test_a_header_is_of_these_pages_alone(fd: int):
    assert not opened(fd).matches
    opened(fd).write_header()
    assert opened(fd).matches
    assert os.fstat(fd).st_size == 4096
    for change in ({"slots": 7}, {"page_size": 8}, {"page_bytes": 101}, {"fingerprint": "other"}):
        assert not opened(fd, **change).matches


def test_branches_and_single_pages_are_found(fd: int):
    ledger = opened(fd)
    for slot, pages in ((6, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (1, (1, 2, 4)), (4, (5,))):
        write(ledger, slot, *pages)
    prefixes, sums = loaded(fd)
    assert prefixes == {(1, 2, 3): [6, 2, 3], (1, 2, 4): [6, 2, 1], (5,): [4]}
    assert sums == {slot: bytes([slot]) * 16 for slot in (6, 2, 3, 1, 4)}
    assert os.fstat(fd).st_size == 4096 + SLOTS * RECORD  # the last slot's record is the last


def test_a_page_without_all_before_it_is_left_out(fd: int):
    ledger = opened(fd)
    for slot, pages in ((1, (1,)), (3, (1, 2, 3)), (4, (7, 8)), (5, (1, 2, 3, 4))):
        write(ledger, slot, *pages)
    prefixes, sums = loaded(fd)
    assert prefixes == {(1,): [1]}
    assert list(sums) == [1]
    write(ledger, 2, 1, 2)
    assert loaded(fd)[0] == {(1, 2, 3, 4): [1, 2, 3, 5]}


def test_a_page_that_two_slots_hold_is_found_once(fd: int):
    ledger = opened(fd)
    for slot, pages in ((5, (1,)), (2, (1,)), (3, (1, 2))):
        write(ledger, slot, *pages)
    prefixes, sums = loaded(fd)
    assert prefixes == {(1, 2): [2, 3]}
    assert sums == {2: bytes([2]) * 16, 3: bytes([3]) * 16}


def test_an_erased_record_is_not_found(fd: int):
    ledger = opened(fd)
    for slot in (1, 2, 3):
        write(ledger, slot, slot)
    ledger.erase(PageId(2))
    assert loaded(fd)[0] == {(1,): [1], (3,): [3]}
    write(ledger, 2, 9)
    assert loaded(fd)[0] == {(1,): [1], (9,): [2], (3,): [3]}


@pytest.mark.parametrize("byte", range(0, RECORD, 5))
@pytest.mark.parametrize("flip", [1, 0x80])
def test_a_record_with_a_wrong_bit_is_not_found(fd: int, byte: int, flip: int):
    for slot in (1, 2):
        write(opened(fd), slot, slot)
    at = 4096 + RECORD + byte
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ flip]), at)
    assert loaded(fd)[0] == {(1,): [1]}


def test_a_record_that_was_written_in_part_is_not_found(fd: int):
    for slot in (1, 2):
        write(opened(fd), slot, slot)
    os.ftruncate(fd, 4096 + 2 * RECORD - 1)
    assert loaded(fd)[0] == {(1,): [1]}
    os.ftruncate(fd, 4096)
    assert loaded(fd) == ({}, {})
