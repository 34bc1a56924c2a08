"""`GET /microserving/timeline`: what an engine has computed and put lately, step by step."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from engine.protocol.message import Message, RequestId

__all__ = [
    "TIMELINE_PUTS",
    "TIMELINE_S",
    "TIMELINE_STEPS",
    "TIMELINE_STEP_REQUESTS",
    "EngineTimeline",
]

TIMELINE_S = 600.0  # for which engines keep steps and puts
TIMELINE_STEPS, TIMELINE_PUTS = 16_384, 4_096  # most that they keep
TIMELINE_STEP_REQUESTS = 4  # named of those whose prompts a step computed

Instant = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[int, Field(ge=0, lt=2**53)]
Names = Annotated[list[RequestId], Field(max_length=TIMELINE_STEP_REQUESTS)]
# Begin, duration, prompt tokens, decodes, and some of the requests whose prompts it computed.
Step = tuple[Instant, Duration, Amount, Amount, Names]
# Begin of the first copy, time to the end of the last one, of which copying; bytes, request.
Put = tuple[Instant, Duration, Duration, Amount, RequestId]


class EngineTimeline(Message):
    """Steps and puts that ended within the latest `?seconds=` (60; up to `TIMELINE_S`).

    Times are seconds on a clock of the engine's own, which said `now` when the reply was made.
    Requests are called as in the calls.
    """

    now: Instant
    steps: Annotated[list[Step], FailFast(), Field(max_length=TIMELINE_STEPS)]
    puts: Annotated[list[Put], FailFast(), Field(max_length=TIMELINE_PUTS)]
