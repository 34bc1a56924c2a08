"""What an engine tells the router's ledger about lent and borrowed memory (Infinite-LLM)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.protocol.message import Count, EngineName, Message

__all__ = ["Heartbeat"]

MAX_ENTRIES = 1024  # creditors or debtors of one instance
Pages = Annotated[int, Field(ge=1, lt=2**31)]
Accounts = Annotated[dict[EngineName, Pages], Field(max_length=MAX_ENTRIES)]


class Heartbeat(Message):
    """An instance's row of the ledger: what it can lend, and its debts, in pages (section 4.4).

    `epoch` increases from process to process, and `sequence` from heartbeat to heartbeat.
    """

    instance: EngineName
    epoch: Count
    sequence: Count
    available: int = Field(ge=0, lt=2**31)  # pages that it would lend now
    # Pages that it would lend if none of its pages were in use. None: it does not tell.
    most: int | None = Field(default=None, ge=0, lt=2**31)
    borrowed: Accounts = Field(default_factory=dict)  # pages, by creditor
    lent: Accounts = Field(default_factory=dict)  # pages, by debtor
