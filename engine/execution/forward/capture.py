"""What captures of CUDA graphs have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["alias", "uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage now, and none in the body.

    A capture fails if its thread frees another graph, and the collector may do that at any time.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Memory:
    """Bytes that the graphs' memory pool has, and keeps as long as the graphs exist."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it from being used again.

    Graphs that are captured later may use the memory for something else. So it is valid only until
    one of them is replayed.
    """
    memory = torch.as_tensor(_Memory(tensor.untyped_storage()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
