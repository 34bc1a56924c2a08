"""The time of attention over blocks that lie with creditors (Infinite-LLM, section 4.6).

In each layer the queries of a step travel to the creditors, these attend to the blocks that they
hold, and the results travel back. Meanwhile the debtor attends to what it holds itself. So
attention takes as long as the slowest of them. All layers of a step are alike and are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.latency import MODELS, Profile, StepLatency, StepWork
from engine.scheduling import Chunk, Generation, Job
from engine.virtual.compute import Compute
from engine.virtual.loans.links import VirtualLinks
from kvcache.errors import PeerUnreachable
from kvcache.lending import CreditorFailed
from kvcache.sequences import AwayBlock, SequenceTable
from kvcache.types import EngineId, LeaseId, SeqId

__all__ = ["MESSAGES", "RemoteAttention", "RemoteWork", "row_bytes"]

Items = tuple[tuple[int, AwayBlock], ...]
MESSAGES = 2  # of a layer and creditor: queries, and results


class RemoteWork(NamedTuple):
    """The attention of one step that a creditor computes."""

    creditor: EngineId
    rows: int  # queries
    work: StepWork


class RemoteAttention:
    """The queries of one debtor's steps."""

    def __init__(
        self, own: EngineId, profile: Profile, sequences: SequenceTable, links: VirtualLinks,
        block_tokens: int,
    ) -> None:  # fmt: skip
        self._own, self._sequences, self._links = own, sequences, links
        self._latency, self._layers, self._put = profile.step, profile.layers, profile.put
        self._block_tokens = block_tokens
        self._row_bytes = row_bytes(profile)
        self._tokens: dict[SeqId, tuple[Items, Counter[EngineId]]] = {}  # the latest of each

    def plan(self, plan: Sequence[tuple[Job, Chunk]]) -> list[RemoteWork]:
        """Return what each creditor has to compute for a step."""
        found: dict[EngineId, RemoteWork] = {}
        for job, chunk in plan:
            sequence = self._sequences[chunk.seq_id]
            if sequence.away is None or not sequence.away.items:
                self._tokens.pop(chunk.seq_id, None)
                continue
            start, count = sequence.length, len(chunk.tokens)
            items = sequence.away.items
            if sequence.beyond:
                items = tuple(each for each in items if each[0] * self._block_tokens < start)
                held = self._count(items)
            else:
                known = self._tokens.get(chunk.seq_id)
                if known is None or known[0] is not items:
                    known = self._tokens[chunk.seq_id] = items, self._count(items)
                held = known[1]
            decodes = count == 1 and chunk.sample and isinstance(job, Generation)
            for creditor, tokens in held.items():
                _, rows, work = found.get(creditor, (creditor, 0, StepWork()))
                if decodes:
                    work = work._replace(decodes=work.decodes + 1, context=work.context + tokens)
                else:
                    squares = work.prompt_squares + 2 * count * tokens
                    work = work._replace(prompt_tokens=1, prompt_squares=squares)
                found[creditor] = RemoteWork(creditor, rows + count, work)
        return list(found.values())

    def forget(self, seq_id: SeqId) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._tokens.pop(seq_id, None)

    def seconds(self, work: StepWork, remote: Sequence[RemoteWork]) -> float:
        """Return the duration of a step whose blocks are all attended to, here or elsewhere."""
        squares = work.prompt_squares - sum(each.work.prompt_squares for each in remote)
        context = work.context - sum(each.work.context for each in remote)
        here = work._replace(prompt_squares=squares, context=context)
        own = _attention_s(self._latency, here)
        return self._latency.seconds(here) - own + max([own, *map(self._answer_s, remote)])

    def serve(self, remote: Sequence[RemoteWork], seconds: float, now: float) -> None:
        """Steps of `seconds` each begin: creditors compute for them."""
        for each in remote:
            if (compute := self._compute(each.creditor)) is not None:
                compute.serve(self._own, _attention_s(compute.latency, each.work) / seconds, now)

    def end(self, remote: Sequence[RemoteWork], now: float) -> None:
        """These steps have ended."""
        for each in remote:
            if (compute := self._compute(each.creditor)) is not None:
                compute.leave(self._own, now)

    def check(self, remote: Sequence[RemoteWork]) -> None:
        """Raise `CreditorFailed` if a creditor of a step has died."""
        failed = [
            self._failure(each.creditor)
            for each in remote
            if self._links.find(each.creditor) is None
        ]
        if failed:
            failed[0].also = tuple(failed[1:])
            raise failed[0]

    def _failure(self, creditor: EngineId) -> CreditorFailed:
        loans: dict[LeaseId, None] = {
            block.loan: None
            for sequence in self._sequences.all()
            for _, block in (sequence.away.items if sequence.away is not None else ())
            if block.creditor == creditor
        }
        reason = PeerUnreachable("it does not answer")
        return CreditorFailed(creditor, list(loans), reason, lost=True)

    def _answer_s(self, remote: RemoteWork) -> float:
        """Return the time from the queries of a step to the results, in all layers."""
        moved = self._layers * remote.rows * self._row_bytes
        travel = MESSAGES * self._layers * self._put.layer_s + moved / self._put.bandwidth
        compute = self._compute(remote.creditor)
        if compute is None:
            return travel  # it has died, which the end of the step shows
        return travel + compute.parts(self._own) * _attention_s(compute.latency, remote.work)

    def _compute(self, creditor: EngineId) -> Compute | None:
        peer = self._links.find(creditor)
        return peer.compute if peer is not None else None

    def _count(self, items: Items) -> Counter[EngineId]:
        found: Counter[EngineId] = Counter()
        for _, block in items:
            found[block.creditor] += self._block_tokens
        return found


def _attention_s(latency: StepLatency, work: StepWork) -> float:
    """Return how much of a step is attention."""
    rest = latency.seconds(work._replace(prompt_squares=0, context=0))
    return max(latency.seconds(work) - rest, 0.0)


def row_bytes(profile: Profile) -> float:
    """Return the bytes of one row in one layer: a query, and its result with two float32 a head.

    As of `shipped_bytes` (`kvcache/remote_attention/debtor/ship_or_pull.py`). Of a model whose
    shape is not known, queries count as wide as keys.
    """
    shape = MODELS.get(profile.model)
    if shape is None:
        return profile.kv_bytes_per_token / profile.layers
    width = shape.heads * shape.head_dim * shape.element_bytes
    return 2 * width + 8 * shape.heads
