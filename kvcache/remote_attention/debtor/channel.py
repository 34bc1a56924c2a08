"""A creditor as its debtor sees it: one connection, with requests and their replies in order."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import torch

from kvcache.attention import Part, PartialAttention, Ranges, split_parts
from kvcache.errors import BadRequest, MicroserveError, PeerUnreachable, Timeout, TooLarge
from kvcache.lending import CreditorFailed
from kvcache.remote_attention.debtor.estimates import RunningEstimate
from kvcache.remote_attention.exchange import (
    HEAD,
    REFUSAL_BYTES,
    AttentionShape,
    Buffers,
    Head,
    Kind,
    Limits,
    Refusal,
    RemoteSpan,
    StepPlan,
    unpack_ranges,
)
from kvcache.types import EngineId, LeaseId

__all__ = ["Answer", "CreditorChannel"]

LEAST_S: Final = 0.02  # for a reply whose deadline has passed: it may have arrived in time


class Answer(NamedTuple):
    """What a creditor has computed of the spans that it was asked about, in one layer."""

    ranges: Ranges  # the keys of the parts of each span
    counts: list[int]  # the rows of each span
    rows: PartialAttention  # of all parts: for each span and each of its parts, the span's rows

    def parts(self) -> list[list[Part]]:
        """Return the parts of each span, as views."""
        return split_parts(self.rows, self.ranges, self.counts)


class _Awaited(NamedTuple):
    """A request whose reply has not been read."""

    kind: Kind
    layer: int
    sent: float  # time.monotonic()


class CreditorChannel:
    """Plans a step, then sends the queries of each layer and reads the answer.

    Every failure is a `CreditorFailed`. A creditor that is lost is disconnected: `closed`. After
    one that has refused, or after `drain`, no reply is outstanding.
    """

    def __init__(
        self,
        creditor: EngineId,
        connection: socket.socket,
        shape: AttentionShape,
        limits: Limits,
        buffers: Buffers,
    ) -> None:
        """The connection has shaken hands."""
        self.creditor = creditor
        self.estimate = RunningEstimate()
        self.closed = False
        self._socket = connection
        self._poll = select.poll()  # `select.select` knows the first 1024 descriptors only
        self._poll.register(connection, select.POLLIN)
        self._using = threading.RLock()  # held while the socket is used, and to close it
        self._shape, self.limits, self._buffers = shape, limits, buffers
        self._awaited: deque[_Awaited] = deque()
        self._step = 0
        self._spans: tuple[RemoteSpan, ...] = ()
        self._loans: tuple[LeaseId, ...] = ()  # of the step
        self._rows = torch.empty(0, dtype=torch.int64)  # of the step's queries
        self._all_rows = False  # whether they are rows 0, 1, 2, …
        self._row_keys = 0
        self._q: torch.Tensor | None = None  # of the last layer, of all rows of the step
        self._refused: CreditorFailed | None = None  # the plan of the step
        self._place: Answer | None = None  # where the answers of the step go
        self._answer_bytes = 0

    @property
    def shared(self) -> bool:
        """Whether the creditor is on this host, so that queries and answers are not copied."""
        return self._buffers.fd >= 0

    def plan(self, step: int, spans: Sequence[RemoteSpan], deadline: float) -> None:
        """Send the plan of a step. Its reply is read with the first answer."""
        self._spans = tuple(spans)
        self._loans = tuple(dict.fromkeys(some.loan for span in spans for some in span.borrowed))
        self._step, self._refused, self._place = step, None, None
        rows = [np.arange(span.row, span.row + span.count) for span in spans]
        self._rows = torch.from_numpy(np.concatenate(rows))
        self._all_rows = bool((self._rows == torch.arange(len(self._rows))).all())
        size = self._shape.page_size
        self._row_keys = sum(span.count * len(span.numbers) * size for span in spans)
        body = StepPlan.pack(self._shape, spans)
        if len(self._rows) > self.limits.rows or len(body) > self.limits.plan_bytes:
            raise self._failed(
                TooLarge(f"{len(self._rows)} rows in a step, {self.limits.rows} at most")
            )
        self._send(Kind.PLAN, 0, body, deadline)

    def query(self, layer: int, q: torch.Tensor, deadline: float) -> None:
        """Send the queries of the step's spans; `q` is `[rows, heads, head_dim]` of all rows."""
        if q.shape[1:] != (self._shape.heads, self._shape.head_dim):
            raise BadRequest(f"queries {list(q.shape)} do not fit {self._shape}")
        queries = self._buffers.queries(len(self._rows))
        if q.dtype != queries.dtype:
            raise BadRequest(f"queries in {q.dtype}, not {queries.dtype}")
        if self._all_rows and len(q) >= len(queries):
            queries.copy_(q[: len(queries)])
        elif q.device.type == "cpu":
            torch.index_select(q, 0, self._rows, out=queries)
        else:
            queries.copy_(q[self._rows.to(q.device)])
        self._q = q
        size = 0 if self.shared else len(self._rows) * self._shape.query_bytes
        self._send(Kind.QUERY, layer, self._buffers.query[:size], deadline)

    def answer(self, layer: int, deadline: float) -> Answer:
        """Return the answer of this layer; its rows are valid until the next query."""
        done = False
        while self._awaited and not done:
            awaited = self._awaited[0]
            done = awaited.kind is Kind.QUERY and awaited.layer == layer
            try:
                self._read_reply(deadline)
            except CreditorFailed as failure:
                if failure.lost:
                    raise
                self._refused = self._refused or failure  # read the replies that follow it
        if self._refused is not None:
            raise self._refused
        if self.closed:
            raise self._lost(PeerUnreachable("the creditor was disconnected"))
        if not done or self._place is None:
            raise BadRequest(f"layer {layer} was not asked for")
        return self._place

    def drain(self, deadline: float) -> None:
        """Read the outstanding replies. Raises only if the creditor is lost."""
        while self._awaited:
            try:
                self._read_reply(deadline)
            except CreditorFailed as failure:
                if failure.lost:
                    raise

    def close(self) -> None:
        """Disconnect. A call under way in another thread fails. Idempotent."""
        self.closed = True
        with suppress(OSError):  # it is closed, or the creditor has done so
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._using:
            self._awaited.clear()
            self._socket.close()
            self._buffers.close()

    def _read_reply(self, deadline: float) -> None:
        with self._using:
            if self.closed:
                raise self._lost(PeerUnreachable("the creditor was disconnected"))
            self._read_reply_to(self._awaited.popleft(), deadline)

    def _read_reply_to(self, awaited: _Awaited, deadline: float) -> None:
        late = bool(self._poll.poll(0))
        try:
            head = Head.unpack(self._read(HEAD.size, deadline))
            if head.kind is Kind.REFUSED and head.size <= REFUSAL_BYTES:
                refusal = Refusal.unpack(self._read(head.size, deadline))
                raise self._failed(refusal.error, refusal.loans)
            if (head.step, head.layer) != (self._step, awaited.layer):
                raise BadRequest(f"a reply for step {head.step}, layer {head.layer}")
            if head.kind is Kind.PLANNED and awaited.kind is Kind.PLAN:
                self._planned(head, deadline)
            elif head.kind is Kind.ANSWER and awaited.kind is Kind.QUERY:
                self._answered(head, deadline)
            else:
                raise BadRequest(f"a reply {head.kind.name} of {head.size} bytes")
        except CreditorFailed:
            raise
        except MicroserveError as error:
            raise self._lost(error) from error
        if head.kind is Kind.ANSWER:
            computed_s, waited_s = head.compute_us * 1e-6, head.waited_us * 1e-6
            self.estimate.add_computation(self._row_keys, computed_s, waited_s)
            if not late:  # else it arrived some time ago
                elapsed = time.monotonic() - awaited.sent
                travelled = len(self._rows) * self._shape.query_bytes + self._answer_bytes
                self.estimate.add_transfer(travelled, elapsed - computed_s - waited_s)

    def _planned(self, head: Head, deadline: float) -> None:
        parts = self.limits.reply_bytes // (4 * self._shape.part_floats) + 1
        if head.size > 4 * len(self._spans) + 8 * parts:
            raise BadRequest(f"the keys of parts in {head.size} bytes")
        ranges = unpack_ranges(self._read(head.size, deadline), len(self._spans))
        _check_ranges(ranges, self._spans, self._shape.page_size)
        counts = [span.count for span in self._spans]
        rows, self._answer_bytes = self._buffers.rows(ranges, counts)
        self._place = Answer(ranges, counts, rows)

    def _answered(self, head: Head, deadline: float) -> None:
        if head.size != (0 if self.shared else self._answer_bytes):
            raise BadRequest(f"an answer of {head.size} bytes, not {self._answer_bytes}")
        self._read_into(self._buffers.reply[: head.size], deadline)
        if self._place is None:
            raise BadRequest("an answer to a step that was not planned")
        # No row is without keys, since all keys that are elsewhere come before the rows of a step.
        if not self._place.rows.is_attention and self._asked_numbers():
            raise BadRequest("an answer that is no attention: it has NaN, infinity or no keys")

    def _asked_numbers(self) -> bool:
        """Whether the queries of the layer were finite; what comes of others is not."""
        if self._q is None:
            return True
        return bool(self._q[self._rows.to(self._q.device)].isfinite().all())

    def _send(self, kind: Kind, layer: int, body: bytes | memoryview, deadline: float) -> None:
        now = time.monotonic()
        head = Head(kind, self._step, layer, len(body)).pack()
        with self._using:
            if self.closed:
                raise self._lost(PeerUnreachable("the creditor was disconnected"))
            self._awaited.append(_Awaited(kind, layer, now))
            try:
                self._socket.settimeout(max(deadline - now, LEAST_S))
                sent = self._socket.sendmsg([head, body])
                if sent < len(head):
                    self._socket.sendall(head[sent:])
                if (rest := max(sent - len(head), 0)) < len(body):
                    self._socket.sendall(body[rest:])
            except TimeoutError as error:
                raise self._lost(Timeout("the creditor does not read")) from error
            except OSError as error:
                raise self._lost(PeerUnreachable(f"the creditor is gone: {error}")) from error

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        self._read_into(memoryview(data), deadline)
        return data

    def _read_into(self, view: memoryview, deadline: float) -> None:
        # However slowly the bytes come, this ends.
        deadline = max(deadline, time.monotonic() + LEAST_S)
        try:
            while view:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
                got = self._socket.recv_into(view)
                if not got:
                    raise PeerUnreachable("the creditor has disconnected")
                view = view[got:]
        except TimeoutError as error:
            raise Timeout("the creditor does not answer in time") from error
        except OSError as error:
            raise PeerUnreachable(f"the creditor is gone: {error}") from error

    def _failed(self, reason: MicroserveError, loans: Sequence[LeaseId] = ()) -> CreditorFailed:
        return CreditorFailed(self.creditor, loans, reason, lost=False)

    def _lost(self, reason: MicroserveError) -> CreditorFailed:
        self.close()
        return CreditorFailed(self.creditor, self._loans, reason, lost=True)


def _check_ranges(ranges: Ranges, spans: Sequence[RemoteSpan], page_size: int) -> None:
    """Raise `BadRequest` unless each span's parts have the keys of its pages and no others, once.

    Others would be merged twice, and fail the steps of sequences that have nothing there.
    """
    for parts, span in zip(ranges, spans, strict=True):
        held = np.unique(span.numbers).astype(np.int64) * page_size
        ordered = sorted(parts)
        begins = np.array([begin for begin, _ in ordered], dtype=np.int64)
        ends = np.array([end for _, end in ordered], dtype=np.int64)
        if not len(begins) or (ends <= begins).any() or (begins[1:] < ends[:-1]).any():
            raise BadRequest("the parts of an answer overlap, or are none")
        at = np.searchsorted(begins, held, side="right") - 1
        if (
            (at < 0).any()
            or (held >= ends[at]).any()
            or not np.isin(begins, held).all()
            or (ends - begins).sum() != len(held) * page_size
        ):
            raise BadRequest("the parts of an answer are over other keys")
