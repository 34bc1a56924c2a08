"""The replies, events and reports of an engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from engine.protocol.capabilities import ALL_CAPABILITIES, Capability
from engine.protocol.heartbeat import Heartbeat
from engine.protocol.message import Count, EngineName, FinishReason, Message, Role
from kvcache.types import PageName

__all__ = [
    "BorrowingState",
    "EngineState",
    "EngineStatistics",
    "Event",
    "ExtendReply",
    "Lease",
    "LendingState",
    "Mirrored",
    "ModelInfo",
    "PageCounts",
    "PrefixChange",
    "PrepRecvReply",
    "RemoteSendReply",
    "TierCounts",
    "TokenLogprob",
    "Usage",
    "WorkerState",
]


Page = Annotated[PageName, Field(min_length=16, max_length=16)]


class PrepRecvReply(Message):
    """Where to put: `prompt[match_len:end]` goes to `kv_addr` within `expires_ms`."""

    lease_id: str
    kv_addr: str
    match_len: Count
    end: Count
    expires_ms: Count


class RemoteSendReply(Message):
    """The result of a send whose last byte has landed.

    `sent_tokens` counts `cached_tokens`, which were present, and those computed and sent.
    `computed_tokens` counts all tokens that ran through the model, sent or not (Figure 8).
    """

    sent_tokens: Count
    cached_tokens: Count
    computed_tokens: Count
    bytes: Count
    ms: float = Field(ge=0.0, allow_inf_nan=False)
    # The part of `ms` after the last computation.
    put_ms: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)


class ExtendReply(Message):
    """The same lease under a new address, with room for `room` tokens in all."""

    kv_addr: str
    room: Count


class PrefixChange(Message):
    """A frame of `GET /microserving/prefixes`, one per line.

    Pages that the prefix cache has gained and lost since the previous frame, by the names of
    `page_names`. The first frame has all pages. A long change comes in several frames, all but the
    last one with `more`; no frame makes a reader know more pages than the cache can hold.
    """

    added: list[Page]
    removed: list[Page]
    more: bool = False


class TokenLogprob(Message):
    """The natural log probability of one token, from the raw logits, and of the likeliest ones."""

    token_id: int
    token: str
    bytes: list[int]
    logprob: float
    top: list[TokenLogprob] = Field(default_factory=list)


class Usage(Message):
    """Token counts of one generation; this engine did not compute `cached_tokens` of the prompt."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count


class Mirrored(Message):
    """The progress of a mirror: the peer's lease holds the KV of the first `landed` tokens.

    `lease_id` tells a replaced mirror from its successor. `stopped` is set if the mirror makes no
    more progress: the type of the error, as in error bodies, with its `message`.
    """

    lease_id: str
    landed: int
    stopped: str | None = None
    message: str | None = None


class Event(Message):
    """The tokens that one step of a generation releases, with their text.

    Tokens held back (an incomplete UTF-8 sequence, a possible stop string) come with a later event.
    The first event has `begin`, the position from which this engine computed. The last one has
    `finish_reason` and `usage`. `mirror` is in the last event of a mirrored generation and in every
    event where it differs from the previous report. A failure is a last event with `error`, an
    error body.
    """

    token_ids: list[int] = Field(default_factory=list)
    text: str = ""
    begin: int | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended the output
    usage: Usage | None = None
    mirror: Mirrored | None = None
    error: dict[str, object] | None = None


class ModelInfo(Message):
    """`GET /microserving/model`: what a router needs to know about the model."""

    name: str = Field(max_length=4096)
    context_length: int = Field(ge=1, lt=2**31)
    vocab_size: int = Field(ge=1, lt=2**31)
    eos_token_ids: list[Count]
    bos_token: str | None
    eos_token: str | None
    tokenizer_json: str
    chat_template: str | None
    fingerprint: str  # equal iff KV is exchangeable: weights, dtype, RoPE, layout, page size
    page_size: int = Field(ge=1, lt=2**31)
    kv_bytes_per_token: Count  # in all layers
    layers: int = Field(default=1, ge=1, lt=2**31)
    add_bos: bool = False
    capabilities: list[Capability] = Field(default_factory=lambda: list(ALL_CAPABILITIES))


class PageCounts(Message):
    """Pages by owner; they sum to `total`, except for `pinned`, which are cached or active too."""

    total: Count
    free: Count
    cached: Count
    leased: Count
    active: Count
    quarantined: Count
    pinned: Count
    lent: Count = 0  # to other engines


class TierCounts(Message):
    """Pages of one tier by owner; they sum to `total`."""

    name: str
    total: Count
    free: Count
    cached: Count
    swapped: Count
    copying: Count


class WorkerState(Message):
    """One worker process of an engine that is split."""

    rank: Count
    stage: Count  # of the pipeline
    pid: Count
    weight_bytes: Count
    restarts: Count  # how often it was replaced since the engine started
    computing_ms: float = 0.0  # without waiting for other stages; with it for the same stage
    # With `--device-pages`: how long computing waited for pages, and the bytes of those fetched
    # from the pool and of new tokens written back.
    swap_wait_ms: float = 0.0
    fetched_bytes: Count = 0
    written_bytes: Count = 0


class Lease(Message):
    """One live lease."""

    lease_id: str
    request_id: str
    state: str
    begin: Count
    end: Count
    landed: Count
    expires_ms: Count


class LendingState(Message):
    """What an engine has computed over lent pages for debtors, since it started."""

    endpoints: list[Annotated[str, Field(max_length=512)]] = Field(max_length=4)
    debtors: Count  # connected now
    answers: Count  # each of one layer
    refusals: Count
    computed_ms: float = Field(ge=0.0, allow_inf_nan=False)
    waited_ms: float = Field(ge=0.0, allow_inf_nan=False)  # of all requests, for their turn


class BorrowingState(Message):
    """What an engine has borrowed, by blocks and loans; its heartbeat counts the pages.

    `creditors` are those that the router named last. Refusals and losses count from the start.
    """

    creditors: list[EngineName] = Field(max_length=64)
    loans: Count
    free_blocks: Count  # without KV
    refusals: Count
    lost_loans: Count


class EngineState(Message):
    """`GET /microserving/state`: pages, leases and queues.

    `secret_digest` is equal for engines that have the same cluster secret: only these accept each
    other's addresses. `heartbeat` is for the router's ledger: engines that lend or borrow memory
    send it with each of these replies. The router tells those with `borrowing` whom to ask.
    `healthy` is what `GET /health` tells, so that routers need one call; None: ask there.
    `prompt_tokens` and `generation_tokens` count what was computed and sampled since the start;
    None: it does not count. `queued_tokens` are those that calls are still to compute or send, each
    from its `begin` on, and `generations` are those that have not ended; None: it does not count
    them.
    """

    engine_id: EngineName
    epoch: Count
    role: Role
    model: str
    page_size: Count
    pages: PageCounts
    running: Count
    waiting: Count
    leases: list[Lease]
    puts_in_flight: Count
    prefix_tokens: Count
    tiers: list[TierCounts] = Field(default_factory=list)  # fastest first
    workers: list[WorkerState] = Field(default_factory=list)  # none: the engine is one process
    draining: bool = False
    healthy: bool | None = None
    secret_digest: str | None = Field(default=None, max_length=64)
    heartbeat: Heartbeat | None = None
    borrowing: BorrowingState | None = None  # None: it does not borrow
    lending: LendingState | None = None  # None: it answers no debtors
    prompt_tokens: Count | None = None
    generation_tokens: Count | None = None
    queued_tokens: Count | None = None
    generations: Count | None = None


Seconds = Annotated[float, Field(ge=1e-6, le=3600.0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=0, le=2**31)]
Squares = Annotated[int, Field(ge=0, le=2**62)]
# Prompt tokens, sum of squares, decodes, their context: `engine.latency.StepWork`.
TimedStep = tuple[Tokens, Squares, Tokens, Tokens, Seconds]
TimedPut = tuple[Annotated[int, Field(ge=1, lt=2**53)], Seconds]  # bytes


class EngineStatistics(Message):
    """`GET /microserving/statistics`: how long this engine's own steps and puts took.

    The latest steps that were timed, and the latest steps and puts of each size. The rest are the
    flags that decide how it divides its work into steps.
    """

    steps: Annotated[list[TimedStep], FailFast(), Field(max_length=4096)]
    puts: Annotated[list[TimedPut], FailFast(), Field(max_length=1024)]
    token_budget: int = Field(ge=1, lt=2**31)
    max_batch: int = Field(ge=1, lt=2**31)
    max_waiting: int = Field(ge=1, lt=2**31)
    decode_slowdown: float = Field(ge=0.0, le=1e6, allow_inf_nan=False)
    lease_ms: int = Field(ge=1, le=3_600_000)
    row_multiple: int = Field(default=0, ge=0, le=4096)  # as of `engine.latency.padded_rows`
