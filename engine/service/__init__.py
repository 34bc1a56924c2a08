"""Service: the engine's calls as async functions, free of HTTP.

May import `engine.execution`, `engine.text` and below. Most classes live on one asyncio event loop.
"""

from engine.service.borrowing import Borrowing, HomeOrders
from engine.service.engine import MicroserveEngine
from engine.service.event_mux import EventMuxes
from engine.service.generation_stream import GenerationStream
from engine.service.lending import Lending
from engine.service.metrics import EngineMetrics
from engine.service.native import NativeEngine
from engine.service.prefix_feed import PrefixFeed

__all__ = [
    "Borrowing",
    "EngineMetrics",
    "EventMuxes",
    "GenerationStream",
    "HomeOrders",
    "Lending",
    "MicroserveEngine",
    "NativeEngine",
    "PrefixFeed",
]
