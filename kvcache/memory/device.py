"""The interface of a device with memory of its own, as regions and transports need it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Allocation", "Copies", "Device", "Mapping"]


class Allocation(Protocol):
    """Memory of this process on a device, zeroed at first.

    It is freed with the last reference. Tensors over it are references.
    """

    memory: torch.Tensor  # [bytes], uint8, on the device
    handle: bytes  # by which other processes of this host map it

    def keep(self) -> None:
        """Do not free the memory before the process ends, because others may be writing to it."""
        ...


class Mapping(Protocol):
    """Another process's allocation, mapped here until the last reference is gone."""

    memory: torch.Tensor  # [bytes], uint8


class Copies(Protocol):
    """Copies on a queue of their own, beside the work of others. One thread uses it at a time."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, runs: npt.NDArray[np.int64]) -> None:
        """Copy runs of bytes and return when they are complete, without the GIL while it waits.

        `runs` is `[runs, 3]`: offset in `source`, in `target`, bytes. Raises `Internal`. After an
        error none of the runs is in flight any more.
        """
        ...


class Device(Protocol):
    """One device of this process."""

    device: torch.device
    uuid: str  # the same for all processes that see it; without colons

    def allocate(self, nbytes: int) -> Allocation:
        """Allocate at least `nbytes` and fill them with zeros.

        Raises `BadRequest` if the device has no room for it.
        """
        ...

    def open_peer(self, handle: bytes, nbytes: int, uuid: str) -> Mapping:
        """Map an allocation of at least `nbytes` on the device `uuid`, also one of this process.

        Raises `PeerUnreachable` if this process does not see that device, if the two devices cannot
        reach each other's memory, or if the allocation is gone.
        """
        ...

    def record_event(self) -> object:
        """Record an event behind the work that the calling thread has started."""
        ...

    def event_done(self, event: object) -> bool:
        """Return whether the work before `event` has completed. Raises if the device has failed."""
        ...

    def copies(self) -> Copies:
        """Return a new queue for copies, ready to run."""
        ...
