"""Pages, their references, the prefix tree and its eviction. Imports no torch."""

from kvcache.pages.page_manager import PageManager
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.pages.prefix_tree import Tokens

__all__ = ["SCRATCH_PAGE", "PageManager", "Tokens"]
