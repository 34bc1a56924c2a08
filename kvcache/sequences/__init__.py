"""Sequences, their block tables, and descriptions of steps. Imports no torch."""

from kvcache.sequences.block_table import PageIds
from kvcache.sequences.interface import SequenceCache
from kvcache.sequences.step import PageCopy, PagedSequence, SendRange, Span, StepDescription
from kvcache.sequences.swapping import SwappedSequence
from kvcache.sequences.table import SequenceTable

__all__ = [
    "PageCopy",
    "PageIds",
    "PagedSequence",
    "SendRange",
    "SequenceCache",
    "SequenceTable",
    "Span",
    "StepDescription",
    "SwappedSequence",
]
