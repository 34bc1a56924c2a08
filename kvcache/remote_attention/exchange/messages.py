"""The messages between a debtor and a creditor, the same over shared memory and TCP.

    debtor   ──► PLAN     what the rows of a step are, and the held pages of their sequences
    creditor ──► PLANNED  the keys of the parts that it will answer with
    debtor   ──► QUERY    for each layer: the queries of all rows
    creditor ──► ANSWER   `o` of the rows of all parts, then `m`, then `l`, in float32

Each message is a head and a body. Each request has one reply, in the order of the requests, which
is REFUSED if something is wrong. Over shared memory the bodies of QUERY and ANSWER are in the
buffers of the connection, and their heads alone travel. Numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Self

import numpy as np

from kvcache import errors
from kvcache.attention import HeldSpan, Ranges
from kvcache.errors import BadRequest, MicroserveError, TooLarge
from kvcache.remote_attention.exchange.shape import DTYPES, AttentionShape, Limits
from kvcache.sequences import PageIds
from kvcache.types import LeaseId, TokenPos

__all__ = [
    "HEAD",
    "REFUSAL_BYTES",
    "BorrowedPages",
    "Head",
    "Kind",
    "Refusal",
    "RemoteSpan",
    "StepPlan",
    "pack_ranges",
    "unpack_ranges",
]

MAGIC: Final = 0x4D41
HEAD: Final = struct.Struct("<HHIQIII")
PLAN: Final = struct.Struct("<IIIIIII")
NAME: Final = 256  # longest id of a loan, characters
REFUSAL_BYTES: Final = 1 << 16
DTYPE_CODES: Final = tuple(DTYPES)


class Kind(IntEnum):
    """What a message says."""

    PLAN = 1
    QUERY = 2
    PLANNED = 16
    ANSWER = 17
    REFUSED = 18


class Head(NamedTuple):
    """What every message begins with."""

    kind: Kind
    step: int
    layer: int = 0
    size: int = 0  # bytes of the body that follow
    compute_us: int = 0  # of an ANSWER: how long the creditor computed
    waited_us: int = 0  # of an ANSWER: how long the request waited for its turn

    def pack(self) -> bytes:
        return HEAD.pack(MAGIC, self.kind, self.layer, self.step, *self[3:])

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Self:
        """Raises `BadRequest` for what is no head."""
        magic, kind, layer, step, *rest = HEAD.unpack(data)
        if magic != MAGIC or kind not in Kind.__members__.values():
            raise BadRequest("this is no message of an exchange of queries")
        return cls(Kind(kind), step, layer, *rest)


@dataclass(frozen=True, slots=True)
class BorrowedPages:
    """Pages of one loan that hold keys of a sequence."""

    loan: LeaseId
    pages: PageIds  # ids in the creditor's pool, in any order
    numbers: PageIds  # the key positions of page i are [numbers[i] * page_size, … + page_size)


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Rows `[row, row + count)` of a step, and the pages of their sequence that a creditor holds.

    The rows are the tokens at positions from `start`, as in a `HeldSpan`.
    """

    row: int
    start: TokenPos
    count: int
    borrowed: tuple[BorrowedPages, ...]

    @property
    def numbers(self) -> PageIds:
        """The numbers of all pages."""
        none: PageIds = np.empty(0, dtype=np.int32)
        return np.concatenate([none, *(some.numbers for some in self.borrowed)])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan as it arrives at a creditor. Only its form has been checked."""

    dtype: str
    heads: int
    group: int  # query heads per KV head
    rows: int
    spans: tuple[HeldSpan, ...]
    pages_of: dict[LeaseId, PageIds]  # by loan

    @staticmethod
    def pack(shape: AttentionShape, spans: Sequence[RemoteSpan]) -> bytes:
        """Return the body of a PLAN. The rows of the spans follow each other from 0 on the wire."""
        borrowed = [some for span in spans for some in span.borrowed]
        loans = list(dict.fromkeys(some.loan for some in borrowed))
        index = {loan: number for number, loan in enumerate(loans)}
        counts = [sum(len(some.pages) for some in span.borrowed) for span in spans]
        names = [loan.encode() for loan in loans]
        rows = sum(span.count for span in spans)
        head = PLAN.pack(
            DTYPE_CODES.index(shape.dtype), shape.heads, shape.heads // shape.kv_heads,
            rows, len(spans), sum(counts), len(loans),
        )  # fmt: skip
        table, row = [], 0
        for span, pages in zip(spans, counts, strict=True):
            table.append((row, span.start, span.count, pages))
            row += span.count
        numbers = [
            np.array(table, dtype=np.int32).ravel(),
            *(some.pages for some in borrowed),
            *(some.numbers for some in borrowed),
            *(np.full(len(some.pages), index[some.loan]) for some in borrowed),
        ]
        packed = np.concatenate(numbers).astype("<i4").tobytes()
        return b"".join([head, packed, *(struct.pack("<H", len(name)) + name for name in names)])

    @classmethod
    def unpack(cls, body: bytes | bytearray, limits: Limits) -> StepPlan:
        """Return the plan of a body.

        Raises `BadRequest` for what is none, and `TooLarge` for more than the limits of what it
        counts.
        """
        if len(body) < PLAN.size:
            raise BadRequest("a plan is cut short")
        code, heads, group, rows, spans, pages, loans = PLAN.unpack_from(body)
        for what, count in (("rows", rows), ("spans", spans), ("pages", pages), ("loans", loans)):
            if count > getattr(limits, what):
                raise TooLarge(f"{count} {what} in a step, {getattr(limits, what)} at most")
        words = 4 * spans + 3 * pages
        if code >= len(DTYPE_CODES) or len(body) < PLAN.size + 4 * words:
            raise BadRequest("a plan is cut short, or of an unknown dtype")
        numbers = np.frombuffer(body, "<i4", words, PLAN.size).astype(np.int32)
        table, (ids, places, owners) = (
            numbers[: 4 * spans].reshape(-1, 4),
            numbers[4 * spans :].reshape(3, -1),
        )
        names = _names(bytes(body[PLAN.size + 4 * words :]), loans)
        counts = table[:, 3]
        if counts.min(initial=0) < 0 or counts.sum(dtype=np.int64) != pages:
            raise BadRequest("the spans of a plan have other pages than the plan")
        if pages and not 0 <= owners.min() <= owners.max() < loans:
            raise BadRequest("a page of a plan belongs to no loan")
        found, page = [], 0
        for row, start, count, own in table.tolist():
            some = slice(page, page + own)
            found.append(HeldSpan(row, TokenPos(start), count, ids[some], places[some]))
            page += own
        by_loan = {name: np.unique(ids[owners == number]) for number, name in enumerate(names)}
        return cls(DTYPE_CODES[code], heads, group, rows, tuple(found), by_loan)


class Refusal(NamedTuple):
    """The body of a REFUSED."""

    error: MicroserveError
    loans: tuple[LeaseId, ...] = ()  # that are none, or have ended

    def pack(self) -> bytes:
        fields = {"type": self.error.type, "message": self.error.message[:1000]}
        body = json.dumps({**fields, "loans": self.loans}).encode()
        return body if len(body) <= REFUSAL_BYTES else json.dumps({**fields, "loans": []}).encode()

    @classmethod
    def unpack(cls, body: bytes | bytearray) -> Refusal:
        """Raises `BadRequest` for what is no refusal."""
        try:
            fields = json.loads(body)
            kind, message = str(fields["type"]), str(fields["message"])
            loans = tuple(LeaseId(str(loan)) for loan in fields["loans"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BadRequest("this is no refusal") from error
        return cls(ERRORS.get(kind, errors.Internal)(message), loans)


ERRORS: Final[dict[str, type[MicroserveError]]] = {
    error.type: error
    for error in (getattr(errors, name) for name in errors.__all__)
    if error is not MicroserveError
}


def pack_ranges(ranges: Ranges) -> bytes:
    """Return the body of a PLANNED: the number of parts of each span, then their keys."""
    counts = [len(parts) for parts in ranges]
    keys = [position for parts in ranges for part in parts for position in part]
    return np.array(counts + keys, dtype="<i4").tobytes()


def unpack_ranges(body: bytes | bytearray, spans: int) -> Ranges:
    """Return the keys of the parts of `spans` spans. Raises `BadRequest` for another body."""
    if len(body) % 4 or len(body) < 4 * spans:
        raise BadRequest("the keys of parts are cut short")
    numbers = np.frombuffer(body, "<i4")
    counts, keys = numbers[:spans], numbers[spans:].tolist()
    if counts.min(initial=0) < 0 or 2 * int(counts.sum(dtype=np.int64)) != len(keys):
        raise BadRequest("the keys of parts are cut short")
    pairs = iter(zip(keys[::2], keys[1::2], strict=True))
    return [[next(pairs) for _ in range(count)] for count in counts.tolist()]


def _names(data: bytes, count: int) -> list[LeaseId]:
    """Return `count` different ids of loans, which are all of `data`."""
    names, at = [], 0
    for _ in range(count):
        if len(data) < at + 2:
            raise BadRequest("the loans of a plan are cut short")
        (size,) = struct.unpack_from("<H", data, at)
        name = data[at + 2 : at + 2 + size]
        at += 2 + size
        try:
            names.append(LeaseId(name.decode()))
        except UnicodeDecodeError:
            raise BadRequest("the id of a loan is no text") from None
        if len(name) < size or not 0 < len(names[-1]) <= NAME:
            raise BadRequest(f"the id of a loan has 1 to {NAME} characters")
    if at != len(data) or len(set(names)) != count:
        raise BadRequest("the loans of a plan are repeated, or more than it says")
    return names
