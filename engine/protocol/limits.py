"""Checks of calls against the sizes of the model and the pool."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.calls import RemoteSend, StartGenerate
from kvcache.errors import BadRange, BadRequest

__all__ = ["Limits", "generation_begin", "resolve_position", "send_range"]


class Limits:
    """Rejects calls that this engine can never serve: `BadRequest`, with the parameter's name."""

    def __init__(
        self, vocab_size: int, context: int, pool_tokens: int, *, reach: int | None = None
    ) -> None:
        """`context` is the longest context to serve, and `pool_tokens` what the KV pool holds.

        `reach` is the longest context of a generation: by default what the pool holds, and more
        for an engine that borrows.
        """
        self._reach = min(context, pool_tokens) if reach is None else reach
        self._vocab_size = vocab_size
        self._context = context
        self._pool_tokens = pool_tokens

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Check that a prompt is not empty and lies within the context and the vocabulary."""
        context, vocab_size = self._context, self._vocab_size
        if not prompt:
            raise BadRequest("the prompt is empty", param="prompt")
        if len(prompt) > context:
            raise BadRequest(
                f"{len(prompt)} tokens exceed the context of {context}",
                param="prompt",
                code="context_length_exceeded",
            )
        if max(prompt) >= vocab_size:
            raise BadRequest(
                f"token {max(prompt)} is outside the vocabulary of {vocab_size}",
                param="prompt",
            )

    def check_sampling(self, call: StartGenerate) -> None:
        """Check that prompt and output fit context and pool, and all ids are in the vocabulary."""
        vocab_size = self._vocab_size
        if len(call.prompt) + call.max_tokens > self._reach:
            fits = f"the context of {self._context}"
            if self._reach < self._context:
                fits = f"the {self._reach} tokens that this engine's KV pool holds"
            raise BadRequest(
                f"{len(call.prompt)} prompt tokens and {call.max_tokens} more exceed {fits}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if len(call.output) >= call.max_tokens:
            raise BadRequest("output has max_tokens already", param="output")
        for name, ids in (
            ("output", call.output),
            ("stop_token_ids", call.stop_token_ids),
            ("logit_bias", call.logit_bias),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise BadRequest(f"{name} has a token outside the vocabulary", param=name)
        if call.min_tokens > call.max_tokens:
            raise BadRequest("min_tokens is above max_tokens", param="min_tokens")

    def check_send(self, end: int) -> None:
        """Check that a prefix of `end` tokens fits the pool."""
        if end > self._pool_tokens:
            raise BadRequest(
                f"{end} tokens exceed this engine's KV pool", param="end", code="exceeds_pool"
            )


def resolve_position(value: int, length: int, name: str) -> int:
    """Return a begin or end as a position; negative values count from the end.

    Raises `BadRange` outside [0, length].
    """
    position = value + length if value < 0 else value
    if not 0 <= position <= length:
        raise BadRange(f"{name} {value} is outside the prompt of {length} tokens", param=name)
    return position


def generation_begin(call: StartGenerate) -> int | None:
    """Return `begin` as a position in prompt and output; None if there is none.

    Raises `BadRange` outside of them, and if it leaves no token to compute.
    """
    if call.begin is None:
        return None
    length = len(call.prompt) + len(call.output)
    begin = resolve_position(call.begin, length, "begin")
    if begin == length:
        raise BadRange("begin must leave a token to compute", param="begin")
    return begin


def send_range(call: RemoteSend) -> tuple[int, int]:
    """Return `begin` and `end` as positions. Raises `BadRange`, also for an empty range."""
    begin = resolve_position(call.begin, len(call.prompt), "begin")
    end = resolve_position(call.end, len(call.prompt), "end")
    if begin >= end:
        raise BadRange(f"begin {begin} is not below end {end}", param="begin")
    return begin, end
