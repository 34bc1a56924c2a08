"""Several page stores as one: each has some layers (pipeline) or KV heads (tensor parallel)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvcache.errors import BadRequest, Internal, Unsupported
from kvcache.lease import ControlSlots, Put
from kvcache.memory import KVLayout
from kvcache.page_store.base import PageStore
from kvcache.remote_attention import RemoteAttention
from kvcache.sequences import PageCopy, PageIds, StepDescription
from kvcache.shard import Shard
from kvcache.tiers import DevicePages
from kvcache.types import TokenPos

__all__ = ["ShardedPageStore"]


class ShardedPageStore:
    """A `PageStore` made of shards. All of them execute the same step descriptions.

    It only computes. It cannot send or receive, because an address names one endpoint, and it has
    no tiers, because a tier copies the pages of one pool. Stores in processes of their own do not
    need this class: their driver passes them the descriptions.
    """

    def __init__(self, stores: Sequence[PageStore]) -> None:
        """`stores` hold each layer and KV head of the model once, as after `kvcache.shard.split`.

        Raises `BadRequest` if they do not.
        """
        whole = replace(stores[0].layout, shard=None)
        if any(replace(store.layout, shard=None) != whole for store in stores):
            raise BadRequest("the stores are for different models")
        self.layout: KVLayout = whole
        self._stores = list(stores)
        self._by_layer: list[list[PageStore]] = []  # by their first head
        for layer in range(whole.layers):
            held = [s for s in stores if s.layout.held.layer <= layer < s.layout.held.layer_end]
            held.sort(key=lambda store: store.layout.held.head)
            heads = [h for s in held for h in range(s.layout.held.head, s.layout.held.head_end)]
            if heads != list(range(whole.kv_heads)):
                raise BadRequest(f"layer {layer} is not held by exactly one store per head")
            self._by_layer.append(held)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.layout.shards

    @property
    def device(self) -> torch.device:
        return self._stores[0].device

    @property
    def slots(self) -> ControlSlots:
        return self._stores[0].slots

    def borrow(self, remote: RemoteAttention) -> None:
        raise Unsupported("several stores share no queries with creditors")

    def device_pages(self) -> DevicePages:
        raise Internal("tiers need one pool")

    def add_put(self, put: Put) -> None:
        raise Internal("nothing is sent from several stores")

    def remove_put(self, claim: int) -> None:
        pass

    def send(self, claim: int, pages: PageIds, begin: TokenPos, end: TokenPos) -> None:
        raise Internal("nothing is sent from several stores")

    def copy(self, copies: Sequence[PageCopy]) -> object:
        events = [store.copy(copies) for store in self._stores]
        return None if all(event is None for event in events) else events

    def event_done(self, event: object) -> bool:
        if not isinstance(event, list):
            return True
        pairs = zip(self._stores, event, strict=True)
        return all(store.event_done(each) for store, each in pairs)

    def begin(self, step: StepDescription) -> None:
        self._each(lambda store: store.begin(step))

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        stores = self._by_layer[layer]
        if len(stores) == 1:
            return stores[0].attention(layer, q, k, v)
        group = q.shape[1] // self.layout.kv_heads
        out = []
        for store in stores:
            held = store.layout.held
            heads = slice(held.head, held.head_end)
            queries = slice(held.head * group, held.head_end * group)
            out.append(store.attention(layer, q[:, queries], k[:, heads], v[:, heads]))
        return torch.cat(out, dim=1)

    def put(self, layer: int) -> None:
        for store in self._by_layer[layer]:
            store.put(layer)

    def end(self) -> None:
        self._each(lambda store: store.end())

    def abort(self) -> None:
        self._each(lambda store: store.abort())

    def check(self) -> None:
        self._each(lambda store: store.check())

    def close(self) -> None:
        self._each(lambda store: store.close())

    def _each(self, do: Callable[[PageStore], None]) -> None:
        for store in self._stores:
            do(store)
