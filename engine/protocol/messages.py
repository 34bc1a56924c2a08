"""Every message between router and engine, once.

Token ids travel as lists of ints; ranges are half open, `prompt[begin:end]`; a negative `begin` or
`end` counts from the end (the paper's Table 1). Requests are strict: an unknown field or a value of
another JSON type is an error, never coerced.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcache.types import PageName

__all__ = [
    "Commit",
    "EngineState",
    "Event",
    "Extend",
    "ExtendReply",
    "Lease",
    "Mirror",
    "MirrorGeneration",
    "Mirrored",
    "ModelInfo",
    "PageCounts",
    "Pin",
    "PrefixChange",
    "PrepRecv",
    "PrepRecvReply",
    "Release",
    "RemoteSend",
    "RemoteSendReply",
    "Sampling",
    "StartGenerate",
    "Structure",
    "TokenLogprob",
    "Usage",
]

RequestId = Annotated[str, Field(min_length=1, max_length=128)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # lower is earlier
Tokens = list[Annotated[int, Field(ge=0)]]
Role = Literal["any", "prefill", "decode"]
FinishReason = Literal["stop", "length"]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


class PrepRecv(Message):
    """`POST /microserving/prep_recv`: match `prompt[:end]` here and make room for the rest of it.

    `reserve` asks for room for that many further tokens; `lease_ms` is how long the lease lives
    while nobody writes into it (milliseconds, default: the engine's `--lease-ms`).
    """

    request_id: RequestId
    prompt: Tokens
    end: int
    reserve: int = Field(default=0, ge=0)
    lease_ms: int | None = Field(default=None, ge=1, le=3_600_000)


class PrepRecvReply(Message):
    """Where to put: `prompt[match_len:end]` is to be written at `kv_addr` within `expires_ms`."""

    lease_id: str
    kv_addr: str
    match_len: int
    end: int
    expires_ms: int


class RemoteSend(Message):
    """`POST /microserving/remote_send`: put the KV of `prompt[begin:end]` at `kv_addr`."""

    request_id: RequestId
    prompt: Tokens
    begin: int
    end: int
    kv_addr: str
    priority: Priority = 0


class RemoteSendReply(Message):
    """After the last byte has landed. `sent_tokens = cached_tokens` (found here) `+` those computed
    and sent; `computed_tokens` counts all that ran through the model, sent or not (Figure 8)."""

    sent_tokens: int
    cached_tokens: int
    computed_tokens: int
    bytes: int
    ms: float
    put_ms: float = 0.0  # of these, when all was computed and only puts were left


class Structure(Message):
    """What an output must look like: a JSON schema, a regex, a grammar in GBNF (root: `root`) or
    one in Lark's form (root: `start`).

    `strict`: objects of a schema have no properties but those that it names. `param` is what the
    client called all this, for errors.
    """

    kind: Literal["json_schema", "regex", "ebnf", "lark"]
    source: str = Field(min_length=1, max_length=2**17)
    strict: bool = True
    param: str = Field(default="response_format", max_length=128)


class Sampling(Message):
    """How tokens are drawn. Randomness is keyed by (seed, choice, position): it survives a move."""

    model_config = ConfigDict(allow_inf_nan=False)  # NaN passes every bound

    max_tokens: int = Field(default=16, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)  # 0: all
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)
    choice: int = Field(default=0, ge=0, lt=2**31)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=16)
    stop_token_ids: Tokens = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict
    )
    logprobs: int | None = Field(default=None, ge=0, le=20)  # how many alternatives; None: none
    structure: Structure | None = None  # its end is an EOS token, also with `ignore_eos`


class Mirror(Message):
    """Where the KV of a running generation goes as well, `every` so many tokens: a lease that
    `prep_recv` has made for its prompt, from `match_len` on."""

    kv_addr: str
    every: int = Field(default=16, ge=1)


class MirrorGeneration(Mirror):
    """`POST /microserving/mirror`: from now on, mirror a generation that runs there as well.

    The lease's prompt is a beginning of its prompt and output. A mirror that it has already ends.
    """

    request_id: RequestId


class StartGenerate(Sampling):
    """`POST /microserving/start_generate`: prefill what is missing and decode, as an event stream.

    With `lease_id`, `begin` is how much of the KV has been put here (omitted: what has landed).
    Without, it is a hint only. `output` are tokens already emitted for this request: the stream
    goes on after them, and `max_tokens`, penalties and randomness count from the first of them.

    `forks` announces so many others that will fork from this one, the further choices of one
    request: each names it by `fork_of`, with the same prompt, and shares the KV of that prompt,
    also of its last page. A hint: whoever finds nothing to fork from computes what it needs.

    With `stream` "mux" the call answers once the generation is taken on, and its events go to the
    open stream `stream_id`, `stream_tokens` at a time, and once in `stream_ms` at most (but for the
    first and the last).

    `mirror` keeps a replica of the KV, from which another engine can go on with its lease and
    `output`, `begin` omitted. It never delays or fails the stream.
    """

    request_id: RequestId
    prompt: Tokens
    begin: int | None = None
    lease_id: str | None = None
    output: Tokens = Field(default_factory=list)
    forks: int = Field(default=0, ge=0, le=1024)
    fork_of: RequestId | None = None
    priority: Priority = 0
    stream: Literal["events", "mux"] = "events"
    stream_id: str | None = None
    stream_tokens: int = Field(default=1, ge=1)
    stream_ms: float = Field(default=0.0, ge=0.0, le=10_000.0)
    mirror: Mirror | None = None


class Extend(Message):
    """`POST /microserving/extend`: room for `reserve` tokens more in the lease of `kv_addr`."""

    kv_addr: str
    reserve: int = Field(ge=1)


class ExtendReply(Message):
    """The same lease under a new address, with room for `room` tokens in all."""

    kv_addr: str
    room: int


class Commit(Message):
    """`POST /microserving/commit`: publish what has landed to the prefix cache; ends the lease."""

    lease_id: str


class Pin(Message):
    """`POST /microserving/pin` and `/unpin`: keep what is cached of `prompt`, or no longer."""

    prompt: Tokens


class PrefixChange(Message):
    """A frame of `GET /microserving/prefixes`, a line each: pages that the prefix cache has gained
    and lost since the frame before, by the names that `page_names` gives. The first frame has all.
    """

    added: list[PageName]
    removed: list[PageName]


class Release(Message):
    """`POST /microserving/release`: end a lease, or abort a send or a generation. Idempotent."""

    lease_id: str | None = None
    request_id: RequestId | None = None


class TokenLogprob(Message):
    """The log probability (natural, of the raw logits) of one token, and of the likeliest."""

    token_id: int
    token: str
    bytes: list[int]
    logprob: float
    top: list[TokenLogprob] = Field(default_factory=list)


class Usage(Message):
    """Tokens of one generation; `cached_tokens` of the prompt were not computed by this engine."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Mirrored(Message):
    """How far a mirror is: `landed` tokens of prompt and output have their KV in the peer's lease.

    `lease_id`: which lease, as a generation that gets another mirror still tells of the one before.

    `stopped`: it will not get further; the type of the error, as in error bodies, and its message.
    """

    lease_id: str
    landed: int
    stopped: str | None = None
    message: str | None = None


class Event(Message):
    """One step of one generation: tokens, together with the text that they release.

    Tokens held back (an unfinished UTF-8 sequence, a possible stop string) are in no event yet. The
    first event carries `begin`, the position from which this engine computed. The last one carries
    `finish_reason` and `usage`. Of a mirrored generation, `mirror` is in the last event and in each
    where it differs from what was said before. A failure is an event with `error` (an error body),
    and is last.
    """

    token_ids: list[int] = Field(default_factory=list)
    text: str = ""
    begin: int | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    usage: Usage | None = None
    mirror: Mirrored | None = None
    error: dict[str, object] | None = None


class ModelInfo(Message):
    """`GET /microserving/model`: all that a router needs to know of the model."""

    name: str
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    bos_token: str | None
    eos_token: str | None
    tokenizer_json: str
    chat_template: str | None
    fingerprint: str  # equal iff KV can travel: weights, dtype, RoPE, layout, page size
    page_size: int
    kv_bytes_per_token: int
    add_bos: bool = False


class PageCounts(Message):
    """Pages by owner; they add up to `total` (pinned ones are among the cached)."""

    total: int
    free: int
    cached: int
    leased: int
    active: int
    quarantined: int
    pinned: int


class TierCounts(Message):
    """Pages below the pool by owner; they add up to `total`."""

    name: str
    total: int
    free: int
    cached: int
    swapped: int
    copying: int


class Lease(Message):
    """One live lease, as `state` shows it."""

    lease_id: str
    request_id: str
    state: str
    begin: int
    end: int
    landed: int
    expires_ms: int


class EngineState(Message):
    """`GET /microserving/state`."""

    engine_id: str
    epoch: int
    role: Role
    model: str
    page_size: int
    pages: PageCounts
    running: int
    waiting: int
    leases: list[Lease]
    puts_in_flight: int
    prefix_tokens: int
    tiers: list[TierCounts] = Field(default_factory=list)  # fastest first
    draining: bool = False
