"""Sequences, their block tables, and descriptions of steps. Imports no torch."""

from kvcache.sequences.away import HOLE, AwayBlock, AwayBlocks, missing_pages
from kvcache.sequences.block_table import PageIds
from kvcache.sequences.elsewhere import BlocksElsewhere, FetchCause, Loss
from kvcache.sequences.interface import SequenceCache
from kvcache.sequences.step import PageCopy, PagedSequence, SendRange, Span, StepDescription
from kvcache.sequences.swapping import SwappedSequence
from kvcache.sequences.table import SequenceTable

__all__ = [
    "HOLE",
    "AwayBlock",
    "AwayBlocks",
    "BlocksElsewhere",
    "FetchCause",
    "Loss",
    "PageCopy",
    "PageIds",
    "PagedSequence",
    "SendRange",
    "SequenceCache",
    "SequenceTable",
    "Span",
    "StepDescription",
    "SwappedSequence",
    "missing_pages",
]
