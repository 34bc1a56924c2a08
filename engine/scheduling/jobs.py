"""Jobs of the scheduler: generations and sends. Each job owns one sequence of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.protocol import MicroserveError, RemoteSendReply, Sampling
from kvcache.lease import Put
from kvcache.types import LeaseId, SeqId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Generation", "GrammarMatcher", "Job", "KVMirror", "Send", "queued_tokens"]


class GrammarMatcher(Protocol):
    """The state of one output in its grammar (`engine.text.grammar.Matcher`)."""

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return `[vocab]`: the tokens that may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one token; return False if the grammar forbids it."""
        ...


class KVMirror(Protocol):
    """The replica of one generation's KV on another engine.

    Implemented by `engine.execution.generation_mirror`.
    """

    @property
    def lease_id(self) -> LeaseId:
        """The peer's lease that holds the replica."""
        ...

    @property
    def landed(self) -> int:
        """Tokens whose KV is known to be in the lease, including those it had from the start."""
        ...

    @property
    def stopped(self) -> MicroserveError | None:
        """The error that stopped the mirror before its generation ended."""
        ...

    @property
    def over(self) -> bool:
        """Whether the mirror sends nothing more."""
        ...

    def advance(self, seq_id: SeqId) -> None:
        """Send the sequence's new KV if there is enough of it."""
        ...

    def renew(self) -> None:
        """Keep the peer's lease alive."""
        ...

    def end(self) -> None:
        """End the mirror together with its generation. Idempotent."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """A running or waiting `start_generate`.

    `tokens` holds the prompt, `tokens[:prompt_len]`, and all output so far, including output of
    earlier engines. Only the step loop's thread appends to it; other threads read only what a step
    has delivered.
    """

    request_id: str
    seq_id: SeqId
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    stop_ids: frozenset[int]  # tokens that end the output; include EOS unless it is ignored
    matcher: GrammarMatcher | None = None  # set for structured output
    forks: int = 0  # generations announced to fork from this one's prompt
    fork_of: str | None = None  # request id of the generation to fork from
    priority: int = 0  # lower runs earlier
    started: bool = False  # the sequence exists in the cache
    asked: int = 0  # position from which the call wants tokens to be computed
    begin: int | None = None  # position from which this engine computes
    cached: int = 0  # tokens present at the start
    generated: int = 0  # tokens sampled by this engine
    mirror: KVMirror | None = None

    @property
    def target(self) -> int:
        """Tokens whose KV is needed before the next token can be sampled."""
        return len(self.tokens)

    @property
    def output(self) -> Sequence[int]:
        """All output so far."""
        return self.tokens[self.prompt_len :]


@dataclass(slots=True, eq=False)
class Send:
    """A running or waiting `remote_send` of `tokens[begin:]`; `tokens` stops at the send's end."""

    request_id: str
    seq_id: SeqId
    tokens: list[int]
    begin: int
    cached: int  # of `tokens`, present at the start
    put: Put
    done: Future[RemoteSendReply]
    arrived: float  # seconds, by the clock of the stepper
    started: bool  # the sequence exists in the cache, with pages for all of `tokens`
    priority: int = 0  # lower runs earlier
    failure: MicroserveError | None = None
    computed_at: float = 0.0  # seconds: all KV is computed, only writes are left

    @property
    def target(self) -> int:
        """Tokens whose KV the send needs."""
        return len(self.tokens)

    def complete(self, outcome: RemoteSendReply | BaseException) -> None:
        """Complete the call, on any thread. The first outcome counts."""
        with suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.done.set_exception(outcome)
            else:
                self.done.set_result(outcome)


Job = Generation | Send


def queued_tokens(jobs: Iterable[Job]) -> int:
    """Return how many tokens jobs have to compute or send, as their callers count them.

    Those are the tokens from the `begin` of the call on, all of them until a generation has its
    first token, or a send has ended. What the engine has cached beyond `begin` does not count.
    """
    return sum(
        job.target - (job.begin if isinstance(job, Send) else max(job.asked, job.begin or 0))
        for job in jobs
        if isinstance(job, Send) or not job.generated
    )
