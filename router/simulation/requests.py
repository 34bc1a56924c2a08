"""Requests of a workload as those of a simulation."""

from __future__ import annotations

from pydantic import ValidationError

from engine.protocol import BadRequest, Sampling, bad_request
from engine.virtual import VOCAB
from router.workload import LoadRequest

__all__ = ["prompt_of", "sampling_of"]


def prompt_of(load: LoadRequest, number: int) -> list[int]:
    """Return a request's prompt. Raises `BadRequest` if it is a text."""
    prompt = load.body.get("prompt")
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BadRequest(
            f"request {number} of the workload is a text: a simulation has no tokenizer, so "
            "prompts are lists of token ids"
        )
    if prompt and not 0 <= min(prompt) <= max(prompt) < VOCAB:
        return [token % VOCAB for token in prompt]
    return prompt


def sampling_of(load: LoadRequest, number: int) -> Sampling:
    """Return a request's sampling. Raises `BadRequest` for a number of tokens that is none."""
    try:
        return Sampling(max_tokens=load.body["max_tokens"], temperature=0.0)
    except ValidationError as invalid:
        problem = bad_request(invalid).message
        raise BadRequest(f"request {number} of the workload: {problem}") from None
