"""`Core`: what this project keeps in the process of vLLM's engine core."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from engine.vllm.core.arrivals import Arrivals
from engine.vllm.core.memory import Placement, fingerprint, layer_indices, layout_of
from engine.vllm.core.notes import Notes
from engine.vllm.core.pool import VllmPages
from engine.vllm.core.sends import Sends
from engine.vllm.core.settings import CoreSettings
from engine.vllm.core.starts import Starts
from kvcache.errors import Internal
from kvcache.lease import Identity, LeaseReceiver, Sender
from kvcache.transport import make_transport
from kvcache.types import EngineId, PageId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Core", "core"]

PR_SET_PDEATHSIG = 1
_cores: list[Core] = []  # at most one: vLLM makes two connectors in this process, which share it


def core() -> Core:
    """Return the one of this process. Raises `Internal` before there is one."""
    if not _cores:
        raise Internal("the connector's worker side is not in this process")
    return _cores[0]


class Core:
    """The memory of vLLM's KV cache, the leases over its blocks, and the puts from them.

    vLLM makes it in three steps: the connector's worker side before the KV cache is allocated,
    `register` behind that, and `bind` once there is a scheduler.
    """

    pages: VllmPages
    starts: Starts
    receiver: LeaseReceiver
    sends: Sends

    def __init__(self, config: VllmConfig, kv_config: KVCacheConfig) -> None:
        """Make the memory. Raises `BadRequest` for models whose KV cannot be moved."""
        settings = CoreSettings.read(config.kv_transfer_config.kv_connector_extra_config)
        _die_with(settings.lead)
        # vLLM asks for the processor's matrix tiles (AMX) in some kernels only. Its attention uses
        # them, too, and would end the process if a receiver of KV begins with one token.
        torch.cpu._init_amx()
        self.settings = settings
        self.layout = layout_of(kv_config)
        self.layers = layer_indices(kv_config)
        self.failure = ""  # why no KV moves, if so
        spec = kv_config.kv_cache_groups[0].kv_cache_spec
        self.identity = Identity(
            EngineId(settings.engine_id),
            settings.epoch,
            settings.secret,
            fingerprint(self.layout, config, spec, settings.weights),
            settings.url,
        )
        self._config = config
        self.transport = make_transport(
            settings.transport,
            settings.epoch,
            secret=settings.secret,
            network=settings.network,
            # As vLLM itself does, which fills its KV cache with zeros. Its layers lie one behind
            # the other, so the first blocks are all over the pool.
            prefault_bytes=self.layout.nbytes,
        )
        self._region = self.transport.allocate(self.layout)
        self._placement = Placement(self._region)
        self._notes = Notes(settings.notes)
        self._arrivals = Arrivals(self._region.slots, self._notes.send)
        self._counted_at = 0.0
        _cores.append(self)

    def placement(self) -> AbstractContextManager[Any]:
        """Return the context in which vLLM allocates its KV cache."""
        return self._placement

    def register(self, layers: dict[str, torch.Tensor]) -> None:
        """Let peers write into vLLM's KV cache. Raises `Internal` if it is elsewhere."""
        self._placement.check(layers, self.layers)
        self.transport.register(self._region)

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's blocks into account."""
        size = self.layout.page_size
        hash_fn = get_hash_fn_by_name(self._config.cache_config.prefix_caching_hash_algo)
        self.pages = VllmPages(manager, size, get_request_block_hasher(size, hash_fn))
        self.starts = Starts(self.pages, size, self.copy_block)
        self.receiver = LeaseReceiver(
            self.pages,
            self.starts,
            self._region,
            lambda: self.transport.endpoint,
            self.layout.shards,
            self.identity,
            time.monotonic,
        )
        sender = Sender(
            self.pages,
            size,
            self.layout.layers,
            self.transport,
            self.identity,
            threading.RLock(),
        )
        self.sends = Sends(self.pages, sender, size, self.layout.layers, self._notes.send)

    def copy_block(self, source: PageId, target: PageId) -> None:
        """Copy a block in all layers."""
        layout, pool = self.layout, self._region.pool
        for layer in range(layout.layers):
            at, to = (
                layer * layout.layer_stride + page * layout.block_stride
                for page in (source, target)
            )
            pool[to : to + layout.layer_bytes].copy_(pool[at : at + layout.layer_bytes])

    def watch(self, lease_id: str, slot: int, nonce: int, wanted: int) -> None:
        """Note when that much has landed in a lease, or it has ended."""
        self._arrivals.watch(lease_id, slot, nonce, wanted)

    def report(self, *, every_s: float = 0.0) -> None:
        """Note changes of the prefix cache and, after `every_s` since the last time, the counts."""
        added, removed = self.pages.changes()
        note: dict[str, Any] = {}
        if added or removed:
            note = {"added": added, "removed": removed}
        now = time.monotonic()
        if now - self._counted_at >= every_s:
            self._counted_at = now
            note["pages"] = self.use()
        if note:
            self._notes.send(note)

    def stepped(self, requests: int) -> None:
        """Note that a step begins, which computes tokens of that many requests."""
        self._notes.send({"step": requests})

    def use(self) -> dict[str, int]:
        """Return the blocks by owner."""
        leases = self.receiver.leases
        held = sum(len(pages) for pages in self.starts.holders())
        return self.pages.use(leases.leased, leases.quarantined, held)._asdict()

    def check(self) -> None:
        """Check that every reference to a block has an owner. Raises `Internal`."""
        self.sends.reap()
        holders = (*self.receiver.holders(), *self.starts.holders(), *self.sends.holders())
        self.pages.check(holders)

    def close(self) -> None:
        """End the threads, before the process exits."""
        self.sends.close()
        self._arrivals.close()
        self.transport.close()
        self._notes.close()
        _cores.clear()


def _die_with(lead: int) -> None:
    """Have the kernel kill this process when its parent ends, which is the lead."""
    if os.getppid() == lead:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
