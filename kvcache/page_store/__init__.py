"""Page stores: they own the memory of pages and execute step descriptions."""

from kvcache.page_store.base import PageStore
from kvcache.page_store.torch_store import TorchPageStore

__all__ = ["PageStore", "TorchPageStore"]
