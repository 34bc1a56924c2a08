"""Whether there is a GPU for tests, and transports on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import pytest
import torch

from kvcache.errors import BadRequest
from kvcache.memory.cuda import CudaDevice, runtime
from kvcache.transport.cuda_ipc import CudaIpcTransport

__all__ = ["CUDA_IPC", "NEEDS_CUDA", "cuda_ipc_transport", "needs_cuda", "settle"]

Test = TypeVar("Test", bound=Callable[..., None])


@cache
def _missing() -> str:
    """Return what is missing for tests on a GPU; an empty string if nothing is."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        runtime()
    except BadRequest as error:
        return error.message
    return ""


NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(bool(_missing()), reason=f"needs a GPU of NVIDIA: {_missing()}"),
]
CUDA_IPC = pytest.param("cuda_ipc", marks=NEEDS_CUDA)


def needs_cuda(test: Test) -> Test:
    """Mark a test that runs on a GPU only."""
    for mark in NEEDS_CUDA:
        test = mark(test)
    return test


def cuda_ipc_transport(epoch: int) -> CudaIpcTransport:
    return CudaIpcTransport(epoch, CudaDevice(torch.device("cuda")))


def settle(pool: torch.Tensor) -> None:
    """Wait for all work on the pool's device. Peers write on streams of their own."""
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)
