"""What the step loop works on: generations and sends. Each owns one sequence of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.protocol import MicroserveError, RemoteSendReply, Sampling
from kvcache.lease.put import Put
from kvcache.types import SeqId

if TYPE_CHECKING:
    from engine.execution.mirroring import Mirroring
    from engine.text.grammar import Matcher

__all__ = ["Generation", "Job", "Sampled", "Send"]


@dataclass(slots=True)
class Sampled:
    """One token drawn, and on request its log probability and the likeliest alternatives."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)  # (token, logprob), likeliest first
    failure: MicroserveError | None = None  # no token could be drawn


@dataclass(slots=True, eq=False)
class Generation:
    """A running or waiting `start_generate`.

    `tokens` is the prompt and all output so far, from other engines too; those up to `prompt_len`
    are the prompt. The loop appends to it; everybody else only reads what the loop has delivered.
    """

    request_id: str
    seq_id: SeqId
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    stop_ids: frozenset[int]  # end the output; EOS among them unless ignored
    matcher: Matcher | None = None  # where the output stands in its grammar, if it has one
    forks: int = 0  # generations that are still to fork from this one's prompt
    fork_of: str | None = None  # request id of the one to fork from
    priority: int = 0  # lower is earlier
    started: bool = False  # the sequence exists in the cache
    begin: int | None = None  # where this engine began to compute
    cached: int = 0  # tokens that were here at the start
    generated: int = 0  # tokens drawn by this engine
    mirror: Mirroring | None = None

    @property
    def target(self) -> int:
        """Tokens whose KV is needed before the next one can be drawn."""
        return len(self.tokens)

    @property
    def output(self) -> Sequence[int]:
        """All output so far."""
        return self.tokens[self.prompt_len :]


@dataclass(slots=True, eq=False)
class Send:
    """A running or waiting `remote_send` of `tokens[begin:]`; `tokens` ends where the send does."""

    request_id: str
    seq_id: SeqId
    tokens: list[int]
    begin: int
    cached: int  # tokens that were here at the start
    put: Put
    done: Future[RemoteSendReply]
    arrived: float  # seconds, monotonic
    started: bool  # the sequence exists in the cache, with pages for all of `tokens`
    priority: int = 0  # lower is earlier
    failure: MicroserveError | None = None
    computed_at: float = 0.0  # seconds, monotonic: from then on it only waits for its puts

    @property
    def target(self) -> int:
        return len(self.tokens)


Job = Generation | Send
