"""From token ids to text, as it streams: UTF-8 borders, stop strings, and which tokens may go out.

A token is *held back* while the text that it contributes is not certain: it ends within a UTF-8
sequence, or with what may be the beginning of a stop string. Tokens and the text that they release
go out together, so that what has been emitted is always a whole number of tokens, and a stream can
go on behind it on another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.job import Sampled

__all__ = ["Detokenizer", "Released", "token_bytes"]

CONTEXT = 5  # tokens before the first one, for tokenizers whose pieces depend on their neighbours
LONGEST_CHARACTER = 4  # bytes of UTF-8, thus tokens that may wait for its end
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Released:
    """Tokens that go out, with their text; `stopped` is the stop string that ends the output."""

    sampled: list[Sampled]
    text: str
    stopped: str | None = None


class Detokenizer:
    """One output's text. `before` are the tokens it follows, prompt and earlier output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._ids = list(before[-CONTEXT:])  # what is decoded: context and the undecided tail
        self._read = len(self._ids)  # so many of them have given their text
        self._pending: list[
            tuple[Sampled, str | None]
        ] = []  # None: its text comes with a later one

    def push(self, sampled: Sampled, *, last: bool) -> Released:
        """Take a token; `last` says that no more follow, so nothing is held back."""
        self._pending.append((sampled, self._decode(sampled.token, last)))
        text = "".join(part or "" for _, part in self._pending)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            out = [item for item, _ in self._pending]
            self._pending = []
            return Released(out, text[: at + len(stop) * self._include_stop], stop)
        return self._release(len(text) if last else len(text) - self._held(text))

    def flush(self) -> Released:
        """What is held back, when the output ends without a further token."""
        return self._release(sum(len(part or "") for _, part in self._pending))

    def _release(self, certain: int) -> Released:
        """Let the tokens go whose text lies within the first `certain` characters."""
        count = length = taken = 0
        for index, (_, part) in enumerate(self._pending):
            if part is None:
                continue
            if length + len(part) > certain:
                break
            length += len(part)
            count, taken = index + 1, length
        out, self._pending = self._pending[:count], self._pending[count:]
        text = "".join(part or "" for _, part in out)
        return Released([item for item, _ in out], text[:taken])

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _decode(self, token: int, last: bool) -> str | None:
        """The text that a token completes; None if it ends within a character."""
        self._ids.append(token)
        known = self._text(self._ids[: self._read])
        text = self._text(self._ids)
        if (
            text.endswith(REPLACEMENT)
            and not last
            and len(self._ids) - self._read < LONGEST_CHARACTER
        ):
            return None
        # What was just read is the context of what comes next.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text[len(known) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def token_bytes(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """A token as text, and as the bytes it stands for, for log probabilities."""
    piece = tokenizer.id_to_token(token) or ""
    if "ByteLevel" in repr(tokenizer.decoder) and all(char in _BYTE_OF for char in piece):
        raw = bytes(_BYTE_OF[char] for char in piece)
        return raw.decode("utf-8", "replace"), list(raw)
    text = tokenizer.decode([token], skip_special_tokens=False)
    return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, which byte-level BPE vocabularies are written in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return table


_BYTE_OF = _byte_alphabet()
