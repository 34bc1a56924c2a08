"""Incremental detokenization: UTF-8 boundaries, stop strings, and which tokens may be released.

A token is *held back* while its text is not certain: the text ends inside a UTF-8 sequence, or with
a possible prefix of a stop string. Tokens are released together with their text. So the released
output is always a whole number of tokens, and a stream can continue from there on another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.sampling.sampled import Sampled

__all__ = ["Detokenizer", "Released", "token_bytes"]

CONTEXT = 5  # decided tokens that are decoded again: a token's text may depend on its neighbours
MAX_CONTINUATION = 3  # bytes of a UTF-8 character after the first, so tokens that may complete it
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Released:
    """Released tokens and their text; `stopped` is the stop string that ended the output."""

    sampled: list[Sampled]
    text: str
    stopped: str | None = None


class Detokenizer:
    """The text of one output. `before` are the preceding tokens: prompt and earlier output."""

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
        self._ids = recent[-CONTEXT:]  # ids to decode: decided context, then undecided tokens
        self._decided = len(self._ids)  # how many of them have had their text decided
        # Tokens that are not released, with their text; None if it comes with a later token.
        self._pending: list[tuple[Sampled, str | None]] = []

    def push(self, sampled: Sampled, *, last: bool) -> Released:
        """Add a token; return what can be released. With `last`, nothing is held back."""
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
        """Release the tokens whose text lies within the first `certain` characters."""
        count = length = released = 0
        for index, (_, part) in enumerate(self._pending):
            if part is None:
                continue
            if length + len(part) > certain:
                break
            length += len(part)
            count, released = index + 1, length
        out, self._pending = self._pending[:count], self._pending[count:]
        text = "".join(part or "" for _, part in out)
        return Released([item for item, _ in out], text[:released])

    def _held(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _decode(self, token: int, last: bool) -> None:
        """Add a token, and decide the text of all tokens for which it is now certain."""
        if token not in self._skipped:
            self._ids.append(token)
        text = self._text(len(self._ids))
        if last or len(self._ids) == self._decided or not text.endswith(REPLACEMENT):
            self._decide(len(self._ids), len(self._pending) - 1)
            return
        # The text ends inside a character, or with invalid bytes. If a prefix of the tokens is
        # followed by MAX_CONTINUATION others and its text is still a prefix of the whole text, its
        # last bytes are invalid, and no later token changes them.
        for stop in range(self._decided + 1, len(self._ids) - MAX_CONTINUATION + 1):
            if text.startswith(self._text(stop)):
                tokens = (i for i, (item, part) in enumerate(self._pending) if part is None)
                waiting = [i for i in tokens if self._pending[i][0].token not in self._skipped]
                self._decide(stop, waiting[-(len(self._ids) - stop) - 1])
                return

    def _decide(self, stop: int, index: int) -> None:
        """Decide the text of `_ids[_decided:stop]`; it is released with `_pending[index]`."""
        part = self._text(stop)[len(self._text(self._decided)) :]
        self._pending[index] = (self._pending[index][0], part)
        drop = max(stop - CONTEXT, 0)
        del self._ids[:drop]
        self._decided = stop - drop

    def _text(self, stop: int) -> str:
        return self._tokenizer.decode(self._ids[:stop], skip_special_tokens=False)


def token_bytes(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Return a token as text and as bytes, for the log probabilities of a response."""
    piece = tokenizer.id_to_token(token) or ""
    if "ByteLevel" in repr(tokenizer.decoder) and all(char in _BYTE_OF for char in piece):
        raw = bytes(_BYTE_OF[char] for char in piece)
        return raw.decode("utf-8", "replace"), list(raw)
    text = tokenizer.decode([token], skip_special_tokens=False)
    return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for each byte, used by byte-level BPE vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return table


_BYTE_OF = _byte_alphabet()
