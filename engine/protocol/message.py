"""The base of all messages between router and engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

__all__ = [
    "Count",
    "EngineName",
    "FinishReason",
    "Message",
    "Priority",
    "RequestId",
    "Role",
    "Tokens",
]

RequestId = Annotated[str, Field(min_length=1, max_length=128)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # lower runs earlier
Count = Annotated[int, Field(ge=0, lt=2**63)]  # fits into the integers of any JSON writer
# What an engine calls itself. Routers show it in logs, metrics and error messages.
EngineName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
# The first bad token is enough: each would cost the memory of an error.
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
Role = Literal["any", "prefill", "decode"]
FinishReason = Literal["stop", "length"]


class Message(BaseModel):
    """A strict message: unknown fields and values of another JSON type are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")
