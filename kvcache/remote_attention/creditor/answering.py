"""What a creditor computes for debtors: plans of their steps, and the parts of each layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from kvcache.attention import held_planner_for
from kvcache.errors import BadRequest, Forbidden, LeaseExpired, MicroserveError
from kvcache.memory import KVLayout
from kvcache.remote_attention.creditor.checks import check_plan
from kvcache.remote_attention.creditor.debtor_connection import (
    DebtorConnection,
    PlannedStep,
    Request,
)
from kvcache.remote_attention.creditor.loans import BadLoans, Debtor
from kvcache.remote_attention.exchange import (
    AttentionShape,
    Head,
    Kind,
    Limits,
    Refusal,
    StepPlan,
    pack_ranges,
)
from kvcache.types import LeaseId, PageId

__all__ = ["Answering", "RefusedError"]


class RefusedError(Exception):
    """Carries a refusal that names loans."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.error.message)
        self.refusal = refusal


class Answering:
    """Answers the requests of debtors over a pool; see `Creditor`. Called by one thread."""

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        query_heads: int,
        *,
        limits: Limits,
        bad_loans: BadLoans,
        guard: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Raises `Unsupported` for a pool that holds a part of the model."""
        self.shape = AttentionShape.of(layout, query_heads)
        self.limits = limits
        self.answers = 0
        self.computed_s = 0.0
        self._pool, self._layout = pool, layout
        self._bad_loans, self._guard = bad_loans, guard
        self._planner = held_planner_for(layout, query_heads // layout.kv_heads, pool.device)
        self._planner([])  # compiles the kernels of this shape

    def answer(self, connection: DebtorConnection, request: Request, waited_s: float) -> None:
        """Queue the reply to a request, which had to wait for its turn.

        Raises `MicroserveError` or `RefusedError` for what is refused.
        """
        if request.head.kind is Kind.PLAN:
            self._plan(connection, request)
        else:
            self._attend(connection, request.head, waited_s)

    def _plan(self, connection: DebtorConnection, request: Request) -> None:
        step = request.head.step
        connection.planned = None
        connection.refused = step, Refusal(BadRequest("the step was not planned"))
        try:
            plan = StepPlan.unpack(request.body or b"", self.limits)
            check_plan(plan, self.shape, self._layout, self.limits)
            pages_of = {
                loan: frozenset(map(PageId, pages.tolist()))
                for loan, pages in plan.pages_of.items()
            }
            self._check_loans(connection.debtor, pages_of, Forbidden)
            held = self._planner(plan.spans)
            ranges = held.part_ranges
            place, size = connection.buffers.rows(ranges, [span.count for span in plan.spans])
        except RefusedError as refused:
            connection.refused = step, refused.refusal
            raise
        except MicroserveError as error:
            connection.refused = step, Refusal(error)
            raise
        connection.planned = PlannedStep(step, plan.rows, pages_of, held, place, size)
        connection.reply(Head(Kind.PLANNED, step), pack_ranges(ranges))

    def _attend(self, connection: DebtorConnection, head: Head, waited_s: float) -> None:
        planned = connection.planned
        if planned is None or planned.step != head.step:
            step, refusal = connection.refused
            if planned is None and step == head.step:
                raise RefusedError(refusal)
            raise BadRequest(f"step {head.step} was not planned")
        if head.layer >= self.shape.layers:
            raise BadRequest(f"layer {head.layer} of {self.shape.layers}")
        size = 0 if connection.shared else planned.rows * self.shape.query_bytes
        if head.size != size:
            raise BadRequest(f"queries of {head.size} bytes, not {size}")
        queries = connection.buffers.queries(planned.rows).to(self._pool.device)
        with self._guard():
            self._check_loans(connection.debtor, planned.pages_of, LeaseExpired)
            began = time.monotonic()
            if self._pool.device.type == "cpu":
                planned.plan.attend_rows(self._pool[head.layer], queries, planned.place)
            else:
                planned.place.copy_(planned.plan.attend_rows(self._pool[head.layer], queries))
            computed_s = time.monotonic() - began
            self._check_loans(connection.debtor, planned.pages_of, LeaseExpired)
        self.answers += 1
        self.computed_s += computed_s
        body = memoryview(b"") if connection.shared else connection.buffers.reply
        answer = Head(
            Kind.ANSWER, head.step, head.layer,
            compute_us=round(computed_s * 1e6), waited_us=round(waited_s * 1e6),
        )  # fmt: skip
        connection.reply(answer, body[: planned.answer_bytes])

    def _check_loans(
        self,
        debtor: Debtor,
        pages_of: dict[LeaseId, frozenset[PageId]],
        error: type[MicroserveError],
    ) -> None:
        """Refuse the loans that are none, or that do not have these pages."""
        bad = self._bad_loans(debtor, pages_of)
        if bad:
            shown = ", ".join(bad[:3])
            message = f"pages of no live loan of {debtor.engine_id}: loan {shown}"
            raise RefusedError(Refusal(error(message), bad))
