"""Types for ids that are plain integers and strings otherwise."""

from __future__ import annotations

from typing import NewType

__all__ = ["EngineId", "LeaseId", "PageId", "PageName", "SeqId", "SlotIndex", "TokenPos"]

PageId = NewType("PageId", int)  # a page of the pool; 0 is the scratch page
PageName = NewType("PageName", str)  # a page of a prefix; identifies all tokens up to its end
SlotIndex = NewType("SlotIndex", int)  # the control slot of a receive lease
TokenPos = NewType("TokenPos", int)  # absolute position in a sequence
SeqId = NewType("SeqId", int)  # a sequence of this engine's cache
LeaseId = NewType("LeaseId", str)  # a receive lease of this engine
EngineId = NewType("EngineId", str)  # an engine of the fleet
