"""Workloads: requests from a seed or from a file. The same seed gives the same requests."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.protocol import BadRequest

__all__ = ["WORKLOADS", "LoadRequest", "fixed", "jsonl", "long", "mooncake", "sharegpt"]

WORKLOADS = ("fixed", "sharegpt", "long", "jsonl", "mooncake")
# Token ids of random prompts. Every vocabulary has them, and they are not special in our models.
FIRST_ID, IDS = 10, 290
MOONCAKE_BLOCK = 512  # tokens per hash id

# Lengths distributed like those of ShareGPT's conversations: log-normal (median, sigma), clipped.
# The means are about 210 tokens in and 190 out.
SHAREGPT_IN, SHAREGPT_OUT, SHAREGPT_CLIP = (94, 1.3), (120, 1.0), (4, 1024)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. `body` has a prompt or messages. `at_s` is its time in a trace."""

    body: dict[str, Any]
    input_tokens: int | None  # `None`: unknown
    at_s: float | None = None


def fixed(seed: int, input: int, output: int) -> Iterator[LoadRequest]:
    """Yield random prompts of `input` tokens, for `output` tokens each."""
    source = random.Random(seed)
    while True:
        yield _random(source, input, output)


def sharegpt(seed: int) -> Iterator[LoadRequest]:
    """Yield lengths like those of conversations: many short, some long."""
    source = random.Random(seed)

    def draw(median: float, sigma: float) -> int:
        low, high = SHAREGPT_CLIP
        return min(max(round(median * source.lognormvariate(0, sigma)), low), high)

    while True:
        yield _random(source, draw(*SHAREGPT_IN), draw(*SHAREGPT_OUT))


def long(seed: int, input: int, output: int) -> Iterator[LoadRequest]:
    """Yield long prompts of uniform length, from half of `input` to all of it."""
    source = random.Random(seed)
    while True:
        yield _random(source, source.randint(max(1, input // 2), input), output)


def jsonl(path: Path, output: int) -> Iterator[LoadRequest]:
    """Read one request body per line, and start over at the end.

    A body has `prompt` or `messages`; `max_tokens` defaults to `output`. A bare string is a prompt.
    Raises `BadRequest`, naming the line.
    """
    requests = []
    for number, line in _lines(path):
        fields = _parse(line, number)
        body = {"prompt": fields} if isinstance(fields, str) else fields
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise BadRequest(f"{path}:{number}: want an object with prompt or messages")
        prompt = body.get("prompt")
        known = len(prompt) if isinstance(prompt, list) else None
        requests.append(LoadRequest({"max_tokens": output, **body}, known))
    return itertools.cycle(_nonempty(requests, path))


def mooncake(path: Path, seed: int, scale: float) -> Iterator[LoadRequest]:
    """Read a trace in Mooncake's public format.

    Each line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id per 512
    prompt tokens. Equal ids become equal tokens, so requests share prefixes as in the trace.
    `scale` shrinks all lengths, including the blocks', and keeps the times. Raises `BadRequest`,
    naming the line.
    """
    block = max(1, round(MOONCAKE_BLOCK * scale))
    requests = []
    for number, line in _lines(path):
        fields = _parse(line, number)
        try:
            length, output = int(fields["input_length"]), int(fields["output_length"])
            ids, at_s = list(fields["hash_ids"]), float(fields["timestamp"]) / 1e3
        except (KeyError, TypeError, ValueError):
            raise BadRequest(
                f"{path}:{number}: want timestamp, input_length, output_length and hash_ids"
            ) from None
        length = max(1, round(length * scale))
        tokens: list[int] = []
        for hash_id in ids:
            tokens += _tokens(random.Random(f"{seed} {hash_id}"), block)
        source = random.Random(f"{seed} line {number}")  # tokens beyond the last id
        tokens = (tokens + _tokens(source, max(0, length - len(tokens))))[:length]
        body = {"prompt": tokens, "max_tokens": max(1, round(output * scale))}
        requests.append(LoadRequest(body, length, at_s))
    first = min(request.at_s or 0.0 for request in _nonempty(requests, path))
    requests.sort(key=lambda request: request.at_s or 0.0)
    return (replace(request, at_s=(request.at_s or 0.0) - first) for request in requests)


def _random(source: random.Random, input: int, output: int) -> LoadRequest:
    return LoadRequest({"prompt": _tokens(source, input), "max_tokens": output}, input)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [FIRST_ID + source.randrange(IDS) for _ in range(count)]


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path}: {error}") from None
    return [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _parse(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadRequest(f"line {number}: {error}") from None


def _nonempty(requests: list[LoadRequest], path: Path) -> list[LoadRequest]:
    if not requests:
        raise BadRequest(f"{path}: the file is empty")
    return requests
