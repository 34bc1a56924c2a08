"""Blocks of long sequences in pages of other engines: moved there, given back, and lost.

May import `remote_attention`, `lending`, `lease`, and the rooms below them.
"""

from kvcache.borrowing.answer_limits import AnswerLimits
from kvcache.borrowing.borrowing import Borrowing
from kvcache.borrowing.mover import BlockMover

__all__ = ["AnswerLimits", "BlockMover", "Borrowing"]
