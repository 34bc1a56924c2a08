"""The calls that routers and peers make to an engine.

Token ids travel as lists of ints. Ranges are half open, `prompt[begin:end]`; a negative `begin` or
`end` counts from the end (the paper's Table 1).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from engine.protocol.message import Message, Priority, RequestId, Tokens

__all__ = [
    "Commit",
    "Extend",
    "Mirror",
    "MirrorGeneration",
    "Pin",
    "PrepRecv",
    "Release",
    "RemoteSend",
    "Sampling",
    "StartGenerate",
    "Structure",
]


class PrepRecv(Message):
    """`POST /microserving/prep_recv`: match `prompt[:end]` and allocate pages for the rest of it.

    `reserve` requests room for that many further tokens. `lease_ms` is how long the lease lives
    without a write into it (milliseconds; default: the engine's `--lease-ms`).
    """

    request_id: RequestId
    prompt: Tokens
    end: int
    reserve: int = Field(default=0, ge=0)
    lease_ms: int | None = Field(default=None, ge=1, le=3_600_000)


class RemoteSend(Message):
    """`POST /microserving/remote_send`: put the KV of `prompt[begin:end]` at `kv_addr`."""

    request_id: RequestId
    prompt: Tokens
    begin: int
    end: int
    kv_addr: str
    priority: Priority = 0


class Structure(Message):
    """The form of an output: a JSON schema, a regex, or a grammar in GBNF or Lark.

    The root rule is `root` in GBNF (`ebnf`) and `start` in Lark. With `strict`, objects of a schema
    have only the properties that it names. `param` is the client's name of the parameter that asked
    for this form; errors name it.
    """

    kind: Literal["json_schema", "regex", "ebnf", "lark"]
    source: str = Field(min_length=1, max_length=2**17)
    strict: bool = True
    param: str = Field(default="response_format", max_length=128)


class Sampling(Message):
    """How tokens are sampled.

    The random numbers are a function of (seed, choice, position), so a request continues with the
    same tokens on another engine.
    """

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
    logprobs: int | None = Field(default=None, ge=0, le=20)  # alternatives; None: no logprobs
    structure: Structure | None = None  # EOS ends it, even with `ignore_eos`


class Mirror(Message):
    """A replica of a running generation's KV, which sends at least `every` tokens at a time.

    `kv_addr` is the address of a lease that `prep_recv` has made for the generation's prompt; KV is
    sent from its `match_len` on.
    """

    kv_addr: str
    every: int = Field(default=16, ge=1)


class MirrorGeneration(Mirror):
    """`POST /microserving/mirror`: mirror a generation that is already running.

    The lease's prompt is a prefix of the generation's prompt and output. An earlier mirror of the
    generation ends.
    """

    request_id: RequestId


class StartGenerate(Sampling):
    """`POST /microserving/start_generate`: prefill what is missing and decode, as an event stream.

    With `lease_id`, `begin` is the number of tokens whose KV was put here (default: all that has
    landed). Without it, `begin` is only a hint. `output` holds tokens that the client has already
    received: the stream continues after them, and `max_tokens`, penalties and random numbers count
    from the first of them.

    `forks` announces further choices of this request. Each of them names this generation in
    `fork_of`, has the same prompt, and shares the KV of the whole prompt, including its last page.
    Both are hints: a generation that finds nothing to fork from computes what it needs.

    With `stream` "mux" the call returns once the generation is accepted. Its events go to the open
    stream `stream_id`, with at least `stream_tokens` tokens each and at least `stream_ms` apart,
    except for the first and the last event.

    `mirror` keeps a replica of the KV on another engine, which can continue with its lease and
    `output`, without `begin`. The mirror never delays or fails the stream.
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
    """`POST /microserving/extend`: make room for `reserve` more tokens in a lease."""

    kv_addr: str
    reserve: int = Field(ge=1)


class Commit(Message):
    """`POST /microserving/commit`: publish a landed lease to the prefix cache; ends the lease."""

    lease_id: str


class Pin(Message):
    """`POST /microserving/pin` and `/unpin`: protect the cached part of `prompt` from eviction."""

    prompt: Tokens


class Release(Message):
    """`POST /microserving/release`: end a lease, or abort a send or a generation. Idempotent."""

    lease_id: str | None = None
    request_id: RequestId | None = None
