"""What `top` reads of a router's answers, as records: what they hold can be shown."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

__all__ = ["Audit", "Engine", "Engines", "Revision", "State", "Strategies"]

Whole = Annotated[int, Field(lt=2**63)]
Count = Annotated[Whole, Field(ge=0)]


class Load(BaseModel):
    tokens: Whole
    streams: Whole


class State(BaseModel):
    """The latest state of an engine; what it does not tell is `None`."""

    epoch: Count | None = None
    running: Count | None = None
    waiting: Count | None = None
    puts_in_flight: Count | None = None
    generation_tokens: Count | None = None
    pages: dict[str, Count] = Field(default_factory=dict)  # by owner, and in `total`


class Engine(BaseModel):
    id: str
    role: str
    status: str
    draining: bool
    breaker: str
    load: Load
    state: State | None = None


class Engines(BaseModel):
    """`GET /admin/engines`."""

    engines: list[Engine]


class Revision(BaseModel):
    generation: Whole
    name: str
    params: dict[str, Any]
    in_flight: Whole


class Canary(BaseModel):
    generation: Whole
    percent: float
    ended: Whole
    min_requests: Whole
    failed: Whole


class LastCanary(BaseModel):
    generation: Whole
    decision: str
    why: str


class Strategies(BaseModel):
    """`GET /admin/strategies`."""

    active: Revision
    generations: list[Revision] = Field(default_factory=list)
    canary: Canary | None = None
    last_canary: LastCanary | None = None


class Audit(BaseModel):
    """`GET /admin/audit`."""

    entries: list[dict[str, Any]]
