"""Names that must not be mixed up, as types of their own."""

from __future__ import annotations

from typing import NewType

__all__ = ["EngineId", "EngineRequestId", "GenerationNumber", "LeaseId"]

EngineId = NewType("EngineId", str)
LeaseId = NewType("LeaseId", str)
# What engines know a request by: one per choice and attempt, never the client's X-Request-Id.
EngineRequestId = NewType("EngineRequestId", str)
GenerationNumber = NewType("GenerationNumber", int)
