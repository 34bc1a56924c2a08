"""What a strategy is given (`Request`) and what it yields (`Chunk`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from engine.protocol import PageName, Sampling, page_names

__all__ = ["Chunk", "Mirrored", "Request", "TokenId", "Usage"]

# What a decoder of JSON checks.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Position = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Mirrored(msgspec.Struct):
    """Progress of a generation's replica; the fields are those of `engine.protocol.Mirrored`."""

    landed: Position
    lease_id: str = ""  # older engines leave it out and mean their only lease
    stopped: str | None = None
    message: str | None = None


class Usage(msgspec.Struct, forbid_unknown_fields=True):
    """Token counts of a generation; the fields are those of `engine.protocol.Usage`."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count


class Chunk(msgspec.Struct):
    """What an engine emitted for one request in one step, or in several steps received together.

    The fields are those of `engine.protocol.Event`.
    """

    token_ids: list[TokenId] = []
    text: str = ""
    begin: Position | None = None
    logprobs: list[dict[str, Any]] | None = None  # `TokenLogprob`s in JSON form
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    mirror: Mirrored | None = None

    def extend(self, later: Chunk) -> None:
        """Append the steps that followed this chunk."""
        self.token_ids += later.token_ids
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.usage = later.usage
        if later.mirror is not None:
            self.mirror = later.mirror


@dataclass(frozen=True)
class Request:
    """One choice of one prompt. Strategies read it and compute their ranges from `tokens`.

    `id` is the client's X-Request-Id; engines know the request by other names. `output` holds the
    tokens emitted by earlier attempts: it is empty unless the strategy runs again after a failure.
    It does not grow while the strategy runs.
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    output: list[int] = field(default_factory=list)
    session: str | None = None  # the client's X-Session-ID, for affinity
    priority: int = 0  # set by the client: lower is earlier, on engines too
    chunk_tokens: int = 1  # tokens that an engine may gather into one chunk
    tokens: list[int] = field(init=False, repr=False, compare=False)  # the prompt, plus `output`
    _names: dict[int, list[PageName]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        tokens = self.prompt + self.output if self.output else self.prompt
        object.__setattr__(self, "tokens", tokens)  # it is frozen

    @property
    def greedy(self) -> bool:
        """Whether its tokens depend on those before them alone: no sampling, no penalties."""
        sampling = self.sampling
        return (
            sampling.temperature == 0.0
            and sampling.presence_penalty == sampling.frequency_penalty == 0.0
            and sampling.repetition_penalty == 1.0
        )

    def page_names(self, page_size: int) -> list[PageName]:
        """Return the names of the full pages of `tokens`; computed once for each size."""
        names = self._names.get(page_size)
        if names is None:
            names = self._names[page_size] = page_names(self.tokens, page_size)
        return names
