"""Engines in virtual time: the real scheduler and bookkeeping, no memory, no model and no thread.

May import `engine.execution` without its threads, and the torch-free rooms below. Imports no torch.
Everything runs on one asyncio event loop, and the loop's clock is the only one.
"""

from engine.borrowing import BorrowingSettings
from engine.virtual.engine import VirtualEngine
from engine.virtual.kind import EngineKind
from engine.virtual.loans import VirtualLoanCalls
from engine.virtual.loop import Standstill, VirtualLoop
from engine.virtual.network import Transfer, VirtualNetwork
from engine.virtual.put import Endpoint
from engine.virtual.steps import Row
from engine.virtual.stream import VirtualEvent, VirtualStream
from engine.virtual.tokens import VOCAB, output_tokens

__all__ = [
    "VOCAB",
    "BorrowingSettings",
    "Endpoint",
    "EngineKind",
    "Row",
    "Standstill",
    "Transfer",
    "VirtualEngine",
    "VirtualEvent",
    "VirtualLoanCalls",
    "VirtualLoop",
    "VirtualNetwork",
    "VirtualStream",
    "output_tokens",
]
