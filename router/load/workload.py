"""What is asked: prompts and lengths, from a seed or from a file. The same seed asks the same."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.protocol import BadRequest

__all__ = ["WORKLOADS", "Ask", "fixed", "jsonl", "long", "mooncake", "sharegpt"]

WORKLOADS = ("fixed", "sharegpt", "long", "jsonl", "mooncake")
# Token ids of random prompts: every vocabulary has these, and they are no special tokens in ours.
FIRST_ID, IDS = 10, 290
MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for

# The shape of ShareGPT's conversations, not the data: log-normal, median and sigma, clipped. The
# means are about 210 tokens in and 190 out.
SHAREGPT_IN, SHAREGPT_OUT, SHAREGPT_CLIP = (94, 1.3), (120, 1.0), (4, 1024)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `body` has the prompt or the messages; `at_s`: when, if a trace says so."""

    body: dict[str, Any]
    input_tokens: int | None  # if known
    at_s: float | None = None


def fixed(seed: int, input: int, output: int) -> Iterator[Ask]:
    """So many tokens in and out, each time others."""
    source = random.Random(seed)
    while True:
        yield _random(source, input, output)


def sharegpt(seed: int) -> Iterator[Ask]:
    """Lengths as those of conversations: many short ones, some long."""
    source = random.Random(seed)

    def draw(median: float, sigma: float) -> int:
        low, high = SHAREGPT_CLIP
        return min(max(round(median * source.lognormvariate(0, sigma)), low), high)

    while True:
        yield _random(source, draw(*SHAREGPT_IN), draw(*SHAREGPT_OUT))


def long(seed: int, input: int, output: int) -> Iterator[Ask]:
    """Long prompts: uniform from half of `input` to all of it."""
    source = random.Random(seed)
    while True:
        yield _random(source, source.randint(max(1, input // 2), input), output)


def jsonl(path: Path, output: int) -> Iterator[Ask]:
    """A request body a line: with `prompt` or `messages`, and `max_tokens` if it likes; a bare
    string is a prompt. From the start again at the end. Raises `BadRequest`, naming the line."""
    asks = []
    for number, line in _lines(path):
        fields = _parse(line, number)
        body = {"prompt": fields} if isinstance(fields, str) else fields
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise BadRequest(f"{path}:{number}: want an object with prompt or messages")
        prompt = body.get("prompt")
        known = len(prompt) if isinstance(prompt, list) else None
        asks.append(Ask({"max_tokens": output, **body}, known))
    return itertools.cycle(_some(asks, path))


def mooncake(path: Path, seed: int, scale: float) -> Iterator[Ask]:
    """A trace in Mooncake's public format: a line has `timestamp` (ms), `input_length`,
    `output_length` and `hash_ids`, one for each 512 tokens of the prompt.

    Equal ids stand for equal tokens, so that prefixes are shared as they were. `scale` shrinks all
    lengths, those of the blocks too; the times are kept. Raises `BadRequest`, naming the line.
    """
    block = max(1, round(MOONCAKE_BLOCK * scale))
    asks = []
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
        source = random.Random(f"{seed} line {number}")  # what its ids do not cover
        tokens = (tokens + _tokens(source, max(0, length - len(tokens))))[:length]
        body = {"prompt": tokens, "max_tokens": max(1, round(output * scale))}
        asks.append(Ask(body, length, at_s))
    first = min(ask.at_s or 0.0 for ask in _some(asks, path))
    asks.sort(key=lambda ask: ask.at_s or 0.0)
    return (Ask(ask.body, ask.input_tokens, (ask.at_s or 0.0) - first) for ask in asks)


def _random(source: random.Random, input: int, output: int) -> Ask:
    return Ask({"prompt": _tokens(source, input), "max_tokens": output}, input)


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


def _some(asks: list[Ask], path: Path) -> list[Ask]:
    if not asks:
        raise BadRequest(f"{path}: there is nothing in it")
    return asks
