"""Types of whole responses. `/openapi.json` shows them, and tests hold responses to them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

__all__ = ["ChatReply", "CompletionReply"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class UsageReply(TypedDict):
    """Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Reply(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: UsageReply


class _Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class AlternativeToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatReply(_Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class CompletionReply(_Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
