"""The calls between engines about lent pages (Infinite-LLM, sections 4.3 and 4.4), and replies.

The debtor calls the creditor. Each call names both processes, by the debtor's `epoch` and by
`creditor_epoch`: one that names a process of the past is refused with `stale_epoch`. Calls may be
repeated, and may arrive late or out of order.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.protocol.message import Count, EngineName, Message

__all__ = [
    "BLOCK_TOKENS",
    "Creditor",
    "LendAllocate",
    "LendAllocateReply",
    "LendCreditors",
    "LendCreditorsReply",
    "LendFree",
    "LendFreeReply",
    "LendHome",
    "LendHomeReply",
    "LendRenew",
    "LendRenewReply",
    "LendSend",
    "LendSendReply",
]

BLOCK_TOKENS = 128  # tokens of a borrowed block: `kvcache.attention.BLOCK`, which needs torch
MAX_RENEWED = 1024  # loans of one call
MAX_CREDITORS = 16  # of one list
MAX_ENDPOINTS = 4
MAX_FREED = 1 << 20  # pages of one call
MAX_SENT = 4096  # pages of one call
MAX_HOME = 1 << 16  # blocks of one call
MAX_FREEZE_MS = 60_000
LoanName = EngineName  # the debtor's name for a loan: as long, and as printable
PageNumber = Annotated[int, Field(ge=1, lt=2**31)]
Endpoint = Annotated[str, Field(min_length=1, max_length=512)]
Url = Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")]


class LendCall(Message):
    """What all of these calls say: who asks, and which process of the creditor is meant."""

    debtor: EngineName
    epoch: Count
    creditor_epoch: Count


class LendAllocate(LendCall):
    """`POST /microserving/lend/allocate`: borrow `size` pages under a new `lease_id`.

    A repeated call gets the same answer. A refused debtor asks again under another id.
    """

    lease_id: LoanName
    size: int = Field(ge=1, lt=2**31)


class LendAllocateReply(Message):
    """Whether the pages are lent; false for lack of room, which is no error.

    `kv_addr` names the pages, signed like the address of a receive lease. Its positions count from
    0 in the loan's first page. The loan ends `lease_ms` after the creditor got the call, unless it
    is renewed. The debtor counts from when it sent the call, so its own deadline is earlier.
    `endpoints` are where the creditor answers queries over these pages, the best one first.
    """

    granted: bool
    kv_addr: str | None = None
    lease_ms: Count
    endpoints: list[Endpoint] = Field(
        default_factory=list, max_length=MAX_ENDPOINTS, fail_fast=True
    )


class LendFree(LendCall):
    """`POST /microserving/lend/free`: give back `pages` of a loan, or all of it. Idempotent.

    The debtor's writes into these pages have ended.
    """

    lease_id: LoanName
    pages: list[PageNumber] | None = Field(default=None, max_length=MAX_FREED, fail_fast=True)


class LendFreeReply(Message):
    """How many pages this freed, and the address of what is left of the loan.

    The earlier address is void: it names the freed pages too. None: nothing is left.
    """

    freed_pages: Count
    kv_addr: str | None = None


class LendRenew(LendCall):
    """`POST /microserving/lend/renew`: keep loans for another `lease_ms`."""

    lease_ids: list[LoanName] = Field(max_length=MAX_RENEWED, fail_fast=True)


class LendRenewReply(Message):
    """What has become of each loan that was asked about.

    Those `called_back` are wanted by the creditor: they live until their old deadline, and the
    debtor should free them. Those `ended` are over, or were never made.
    """

    renewed: list[LoanName] = Field(max_length=MAX_RENEWED, fail_fast=True)
    called_back: list[LoanName] = Field(max_length=MAX_RENEWED, fail_fast=True)
    ended: list[LoanName] = Field(max_length=MAX_RENEWED, fail_fast=True)
    lease_ms: Count


class LendSend(LendCall):
    """`POST /microserving/lend/send`: put the KV of `pages` of a loan at the debtor's `kv_addr`.

    It goes there in the order of the list, from position 0 on. The loan lives on.
    """

    lease_id: LoanName
    pages: list[PageNumber] = Field(min_length=1, max_length=MAX_SENT, fail_fast=True)
    kv_addr: str


class LendSendReply(Message):
    """All pages have landed."""

    sent_pages: Count
    bytes: Count


class Creditor(Message):
    """An engine to borrow from, as the router's ledger last heard of it."""

    instance: EngineName
    epoch: Count
    url: Url  # of its HTTP API
    available: int = Field(ge=0, lt=2**31)  # pages that it would lend


class LendCreditors(Message):
    """`POST /microserving/lend/creditors`: whom to ask for pages, in this order.

    The router sends it to engines that borrow, and each list replaces the one before. An old list
    costs refusals and nothing else.
    """

    creditors: list[Creditor] = Field(max_length=MAX_CREDITORS, fail_fast=True)


class LendCreditorsReply(Message):
    """The number of creditors in the list that the debtor now has."""

    creditors: Count


class LendHome(Message):
    """`POST /microserving/lend/home`: bring `blocks` blocks home from `creditor`.

    The router sends it to each debtor in a cycle of debts (section 4.5). For up to `freeze_ms` the
    engine borrows nothing from this creditor and lends nothing further, so that the pages that
    come free in the cycle are there for the blocks that come home. The answer comes when as many
    blocks are home, or when the time is over. A repeated call of the same `swap` waits for the
    first one.
    """

    swap: LoanName  # the router's name for this order
    creditor: EngineName
    creditor_epoch: Count
    blocks: int = Field(ge=1, le=MAX_HOME)  # of `BLOCK_TOKENS` tokens
    freeze_ms: int = Field(ge=1, le=MAX_FREEZE_MS)


class LendHomeReply(Message):
    """How many blocks have come home; fewer where there was no room, or a loan ended."""

    blocks: Count
