"""Formats of traces of requests, by what a line of each says.

    Mooncake  {"timestamp": ms, "input_length", "output_length", "hash_ids": [one per 512 tokens]}
    Azure     TIMESTAMP,ContextTokens,GeneratedTokens
    recorded  {"at_s", "input_tokens", "output_tokens", "pages": [names], "session"?, "strategy"?}

Mooncake: https://github.com/kvcache-ai/Mooncake, FAST25-release. Azure:
https://github.com/Azure/AzurePublicDataset, the LLM inference traces of 2023 and 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from router.workload.prompts import BlockTokens, hashed_blocks, spelled_blocks
from router.workload.request import MOST_TOKENS

__all__ = ["Entry", "Format", "format_of"]

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
# As `engine.protocol.page_names` makes them.
Page = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
# Part of a header: no control characters.
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
MOONCAKE_BLOCK, PAGE = 512, 16  # tokens
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_EPOCH = datetime(2023, 1, 1, tzinfo=UTC)  # near the traces', to keep microseconds


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as a trace describes it. `at_s` counts from any moment."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: list[str]  # names of the prompt's blocks, from its beginning; they may end before it
    session: str | None = None
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of traces.

    Blocks of the same name, of `block_tokens` tokens each, have the same tokens.
    """

    name: str
    parse: Callable[[str], Entry]  # raises `ValueError` with the problem of the line
    has_header: bool = False
    block_tokens: int = 0
    tokens: Callable[[int], BlockTokens] = hashed_blocks  # from a seed


class _Mooncake(msgspec.Struct):
    timestamp: Seconds  # ms
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]


class _Recorded(msgspec.Struct):
    at_s: Seconds
    input_tokens: Tokens
    output_tokens: Tokens
    pages: list[Page]
    session: Name | None = None
    strategy: Name | None = None


def _mooncake(line: str) -> Entry:
    read = _MOONCAKE.decode(line)
    blocks, most = len(read.hash_ids), -(-read.input_length // MOONCAKE_BLOCK)
    if blocks > most:
        raise ValueError(f"{blocks} hash_ids for {read.input_length} tokens, want {most} at most")
    ids = [str(hash_id) for hash_id in read.hash_ids]
    return Entry(read.timestamp / 1e3, read.input_length, read.output_length, ids)


def _recorded(line: str) -> Entry:
    read = _RECORDED.decode(line)
    pages, most = len(read.pages), read.input_tokens // PAGE
    if pages > most:
        raise ValueError(f"{pages} pages for {read.input_tokens} tokens, want {most} at most")
    return Entry(
        read.at_s, read.input_tokens, read.output_tokens, read.pages, read.session, read.strategy
    )


def _azure(line: str) -> Entry:
    fields = line.split(",")
    if len(fields) != 3:
        raise ValueError(f"want {AZURE_HEADER}")
    at = datetime.fromisoformat(fields[0])
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    tokens_in, tokens_out = int(fields[1]), int(fields[2])
    if not (0 <= tokens_in <= MOST_TOKENS and 0 <= tokens_out <= MOST_TOKENS):
        raise ValueError(f"want from 0 to {MOST_TOKENS} tokens")
    return Entry((at - AZURE_EPOCH).total_seconds(), tokens_in, tokens_out, [])


_MOONCAKE, _RECORDED = msgspec.json.Decoder(_Mooncake), msgspec.json.Decoder(_Recorded)
MOONCAKE = Format("mooncake", _mooncake, block_tokens=MOONCAKE_BLOCK)
AZURE = Format("azure", _azure, has_header=True)
RECORDED = Format("recorded", _recorded, block_tokens=PAGE, tokens=spelled_blocks)


def format_of(first: str) -> Format | None:
    """Return the format of the trace whose first line this is; `None` if it is of none."""
    if first.replace(" ", "") == AZURE_HEADER:
        return AZURE
    try:
        fields = msgspec.json.decode(first)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(fields, dict):
        return MOONCAKE if "timestamp" in fields else RECORDED if "at_s" in fields else None
    return None
