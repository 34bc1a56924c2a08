"""Blocks of long sequences in pages of other engines: moved there, fetched home, and lost.

May import `lending`, `lease`, and the rooms below them. Imports no torch.
"""

from kvcache.borrowing.answer_limits import AnswerLimits
from kvcache.borrowing.borrowing import Borrowing
from kvcache.borrowing.fetch import HomeOrder
from kvcache.borrowing.fetch_cost import FetchCost
from kvcache.borrowing.mover import BlockMover

__all__ = ["AnswerLimits", "BlockMover", "Borrowing", "FetchCost", "HomeOrder"]
