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

from engine.sampling.sampled import Sampled

__all__ = ["Detokenizer", "Released", "token_bytes"]

CONTEXT = 5  # decided tokens before the others: pieces may depend on their neighbours
LATE = 3  # bytes of a UTF-8 character after its first, thus tokens that may still complete it
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
        added = tokenizer.get_added_tokens_decoder().items() if skip_special_tokens else ()
        self._skipped = {number for number, token in added if token.special}
        recent = [token for token in before[-4 * CONTEXT :] if token not in self._skipped]
        self._ids = recent[-CONTEXT:]  # what is decoded: context and the undecided tail
        self._read = len(self._ids)  # so many of them have given their text
        self._pending: list[
            tuple[Sampled, str | None]
        ] = []  # None: its text comes with a later one

    def push(self, sampled: Sampled, *, last: bool) -> Released:
        """Take a token; `last` says that no more follow, so nothing is held back."""
        self._pending.append((sampled, None))
        self._decode(sampled.token, last)
        text = "".join(part or "" for _, part in self._pending)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            out = [item for item, _ in self._pending]
            self._pending = []
            return Released(out, text[: at + len(stop) * self._include_stop], stop)
        return self._release(len(text) if last else len(text) - self._held(text))

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

    def _decode(self, token: int, last: bool) -> None:
        """Give their text to the tokens for which it is now certain."""
        if token not in self._skipped:
            self._ids.append(token)
        text = self._text(len(self._ids))
        if last or len(self._ids) == self._read or not text.endswith(REPLACEMENT):
            self._decide(len(self._ids), len(self._pending) - 1)
            return
        # It ends within a character, or with bytes that are none. A token after which so many
        # have come, and whose text by itself is still how it all begins, is of the latter kind.
        for stop in range(self._read + 1, len(self._ids) - LATE + 1):
            if text.startswith(self._text(stop)):
                tokens = (i for i, (item, part) in enumerate(self._pending) if part is None)
                waiting = [i for i in tokens if self._pending[i][0].token not in self._skipped]
                self._decide(stop, waiting[-(len(self._ids) - stop) - 1])
                return

    def _decide(self, stop: int, index: int) -> None:
        """The text of `_ids[_read:stop]` is certain; it goes out with `_pending[index]`."""
        part = self._text(stop)[len(self._text(self._read)) :]
        self._pending[index] = (self._pending[index][0], part)
        drop = max(stop - CONTEXT, 0)
        del self._ids[:drop]
        self._read = stop - drop

    def _text(self, stop: int) -> str:
        return self._tokenizer.decode(self._ids[:stop], skip_special_tokens=False)


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
