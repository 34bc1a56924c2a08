"""The peer process of `shm_peer` with a pool on a GPU."""

from __future__ import annotations

import os
import time

import torch
from cuda_devices import cuda_ipc_transport, settle
from kv_helpers import make_cache
from shm_peer import Commands

from kvcache.errors import MicroserveError
from kvcache.memory import KVLayout
from kvcache.transport import Put, Transport
from kvcache.transport.cuda_ipc import CudaIpcTarget
from kvcache.types import LeaseId, PageId, SeqId, TokenPos

SIZE = 16  # tokens of a big page
LAYER_S = 0.3  # how long the device computes a layer in `send_slow_layers`


def big_layout(pages: int) -> KVLayout:
    """Return a layout of `pages` pages of 512 KiB beside the scratch page."""
    return KVLayout(8, pages + 1, SIZE, 4, 128, torch.float32)


class CudaCommands(Commands):
    target = CudaIpcTarget

    def transport(self, epoch: int) -> Transport:
        return cuda_ipc_transport(epoch)

    def start_and_compare(self, lease_id: str, prompt: list[int]) -> int:
        length = super().start_and_compare(lease_id, prompt)
        self.cache.remove_sequence(SeqId(1))
        return length

    def become_big(self, pages: int) -> None:
        """Start again with a pool of that many pages of 512 KiB, and copies of up to 1 GiB."""
        CudaIpcTarget.commit_bytes = 1 << 30
        self.cache.close()
        name = f"big-{os.getpid()}"
        self.cache = make_cache(self.transport(9), big_layout(pages), name=name, epoch=9)

    def prep_recv_big(self, tokens: int) -> str:
        _, address = self.cache.prep_recv("r", list(range(tokens + 1)), tokens, 0, 60.0)
        return address

    def flood(self, address: str, tokens: int, value: float) -> str:
        """Write a lease with `value` again and again, until that fails; say how."""
        pool = self.cache.store.pool
        pool[:, 1:] = value
        put = self.cache.open_put(address, list(range(tokens + 1)), 0, tokens)
        pages = [PageId(1 + page % (pool.shape[1] - 1)) for page in range(tokens // SIZE)]
        while True:
            try:
                self._write(put, pages, tokens)
            except MicroserveError as error:
                return error.type

    def _write(self, put: Put, pages: list[PageId], tokens: int) -> None:
        put.write(range(8), pages, TokenPos(0), TokenPos(tokens))
        put.close().result(20)

    def open(self, address: str, prompt: list[int], end: int) -> None:
        self.put = self.cache.open_put(address, prompt, 0, end)

    def write_late(self, end: int) -> int:
        """Write with the put that `open` left; return the bytes that it has sent."""
        self.cache.store.pool[:, 1:] = 5.0
        self.put.write(range(2), [PageId(page) for page in range(1, 7)], TokenPos(0), TokenPos(end))
        self.put.signal(TokenPos(end))
        error = self.put.close().exception(20)
        self.cache.store.pool[:] = 0.0
        settle(self.cache.store.pool)
        if error is not None:
            raise error
        return self.put.bytes_sent

    def send_slow_layers(self, address: str, prompt: list[int], end: int) -> float:
        """Send two layers, each of which the device computes for `LAYER_S`.

        Layer n is filled with n + 1. Return how long the calls took, in seconds.
        """
        pool = self.cache.store.pool
        put = self.cache.open_put(address, prompt, 0, end)
        pages = [PageId(page) for page in range(1, 1 - -end // 4)]
        cycles = _cycles(LAYER_S)
        pool[0, 1:] = pool[1, 1:] = 0.0  # the first launch of a kernel may wait for all others
        settle(pool)
        began = time.monotonic()
        for layer in range(2):
            torch.cuda._sleep(cycles)
            pool[layer, 1:] = layer + 1.0
            put.write(range(layer, layer + 1), pages, TokenPos(0), TokenPos(end))
        put.signal(TokenPos(end))
        done = put.close()
        took = time.monotonic() - began
        done.result(20)
        pool[:] = 0.0
        settle(pool)
        return took

    def release(self, lease_id: str) -> None:
        self.cache.release(LeaseId(lease_id))

    def works(self) -> float:
        """Compute something on the GPU."""
        return float(torch.ones(1000, device="cuda").sum())


def _cycles(seconds: float) -> int:
    """Return for how many cycles a kernel sleeps that takes about so long."""
    probe = 10_000_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(probe)  # the first launch loads the kernel
    start.record()
    torch.cuda._sleep(probe)
    end.record()
    end.synchronize()
    return int(probe * seconds * 1000 / start.elapsed_time(end))
