"""Sums over processes, through memory that they share."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from engine.workers.exchange import SharedSum, shared_sum, sum_bytes

WIDTH = 24


def summand(rank: int, number: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn((rows, WIDTH), generator=generator)


def expected(workers: int, number: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    total = summand(0, number, rows).to(dtype).float()
    for rank in range(1, workers):
        total = total + summand(rank, number, rows).to(dtype).float()
    return total.to(dtype)


@pytest.fixture
def memory():
    fd = os.memfd_create("sums")
    os.ftruncate(fd, sum_bytes(3, WIDTH, torch.float32))
    yield fd
    os.close(fd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_gets_the_same_sums(memory: int, workers: int, dtype: torch.dtype):
    """In processes that are forked, some thousand sums of different numbers of rows."""
    children = []
    for rank in range(workers):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                total = SharedSum(memory, workers, rank, WIDTH, dtype)
                for number in range(1500):
                    rows = 1 + number * 7 % 40
                    got = total(summand(rank, number, rows).to(dtype))
                    assert torch.equal(got, expected(workers, number, rows, dtype)), number
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * workers


def test_more_rows_than_there_is_room_for_are_summed_in_parts(memory: int):
    rows, results = 2 * shared_sum.ROWS + 5, {}

    def run(rank: int) -> None:
        total = SharedSum(memory, 2, rank, WIDTH, torch.float32)
        results[rank] = total(summand(rank, 1, rows))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.equal(results[0], expected(2, 1, rows, torch.float32))
    assert torch.equal(results[0], results[1])


def test_a_worker_that_does_not_come_is_given_up(memory: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_sum, "TIMEOUT_S", 0.1)
    with pytest.raises(TimeoutError, match="has not come"):
        SharedSum(memory, 2, 0, WIDTH, torch.float32)(summand(0, 1, 4))
