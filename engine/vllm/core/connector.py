"""The connector that vLLM loads: both sides of it, for its scheduler and for its worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from engine.vllm.core.sends import Send, SendChunk
from engine.vllm.core.state import Core, core
from kvcache.types import PageId, SeqId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["MicroserveConnector"]

COUNT_EVERY_S = 0.25


@dataclass
class StepWork(KVConnectorMetadata):
    """What one step of vLLM's has to do for puts and leases."""

    chunks: list[SendChunk] = field(default_factory=list)
    copies: list[tuple[PageId, PageId]] = field(default_factory=list)  # tails of leases
    preempted: list[Send] = field(default_factory=list)


class MicroserveConnector(KVConnectorBase_V1, SupportsHMA):
    """Connects vLLM's scheduler and worker, which share a process, with the `Core` there.

    A request of vLLM's names what it belongs to in its `kv_transfer_params`: `send`, the id of a
    send, or `start`, the number of a lease that has started.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker = role is KVConnectorRole.WORKER
        self._core = Core(vllm_config, kv_cache_config) if worker else core()
        # The scheduler's side
        self._sending: dict[str, Send] = {}  # by vLLM's request id
        self._copies: list[tuple[PageId, PageId]] = []
        self._used: list[SeqId] = []  # starts that requests take over in the step being planned
        self._copied: list[SeqId] = []  # the same, in the step before
        # The worker's side
        self._work = StepWork()

    @property
    def requires_kv_delivery(self) -> bool:
        """A send that is preempted fails; nothing is handed over behind the end of a request."""
        return False

    # The worker's side

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        return self._core.placement()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._core.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepWork):
            self._work = connector_metadata
            for chunk in self._work.chunks:
                self._core.sends.write_cached(chunk)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepWork):
            for send in kv_connector_metadata.preempted:
                self._core.sends.preempt(send)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        copies, self._work.copies = self._work.copies, []
        for source, target in copies:
            self._core.copy_block(source, target)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        for chunk in self._work.chunks:
            self._core.sends.write_layer(chunk, self._core.layers[layer_name])

    def wait_for_save(self) -> None:
        work, self._work = self._work, StepWork()
        for chunk in work.chunks:
            self._core.sends.end_step(chunk)

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._core.close()

    # The scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._core.bind(kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        number = _param(request, "start")
        start = self._core.starts[SeqId(number)] if isinstance(number, int) else None
        if start is None:
            return 0, False
        # Full blocks are in the prefix cache. The rest is in a block that the request copies.
        full = start.length // self._core.layout.page_size * self._core.layout.page_size
        if num_computed_tokens != full or start.length >= request.num_tokens:
            return 0, False
        return start.length - full, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        send = self._core.sends[_param(request, "send")]
        if send is not None:
            self._sending[request.request_id] = send
        number = _param(request, "start")
        if not isinstance(number, int):
            return
        start = self._core.starts[SeqId(number)]
        if start is not None and num_external_tokens:
            size = self._core.layout.page_size
            tail, full = start.tail(size), start.length // size
            if tail is not None:
                self._copies.append((tail, PageId(blocks.get_block_ids()[0][full])))
        self._used.append(SeqId(number))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for number in self._copied:
            self._core.starts.end(number)
        self._copied, self._used = self._used, []
        work = StepWork(copies=self._copies)
        self._copies = []
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduler_output.preempted_req_ids or ():
            if (send := self._sending.get(request_id)) is not None:
                work.preempted.append(send)
        if self._sending:
            computed = _computed(scheduler_output)
            for request_id, send in self._sending.items():
                if request_id in scheduled and not send.closed:
                    before = computed[request_id]
                    work.chunks.append(
                        SendChunk(
                            send,
                            self._blocks(request_id),
                            cached=min(before, send.end),
                            end=min(before + scheduled[request_id], send.end),
                        )
                    )
        self._core.sends.renew()
        self._core.sends.reap()
        self._core.starts.growing = len(scheduled)
        self._core.stepped(len(scheduled))
        self._core.report(every_s=COUNT_EVERY_S)
        return work

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        send = self._sending.pop(request.request_id, None)
        if send is not None:
            self._core.sends.abandon(send, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def _blocks(self, request_id: str) -> Sequence[int]:
        if self._kv_cache_manager is None:
            return ()
        blocks: Sequence[int] = self._kv_cache_manager.get_block_ids(request_id)[0]
        return blocks


def _param(request: Any, name: str) -> object:
    """Return what a request's parameters say; None if nothing."""
    return (request.kv_transfer_params or {}).get(name)


def _computed(output: Any) -> dict[str, int]:
    """Return how many tokens of each scheduled request have their KV before the step."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return computed | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
