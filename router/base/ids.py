"""Distinct types for ids that must not be mixed up."""

from __future__ import annotations

from typing import NewType

__all__ = ["EngineId", "EngineRequestId", "LeaseId", "RevisionNumber"]

EngineId = NewType("EngineId", str)
LeaseId = NewType("LeaseId", str)
# The name of a request on the engines: one per choice and attempt, never the client's X-Request-Id.
EngineRequestId = NewType("EngineRequestId", str)
# `generation` in the admin API, in receipts and in metrics.
RevisionNumber = NewType("RevisionNumber", int)
