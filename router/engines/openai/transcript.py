"""Which tokens an OpenAI server's text stands for.

A stream that breaks off continues elsewhere, after the tokens that were passed on. So text is
passed on only together with tokens that stand for exactly this text: nothing is repeated then, and
nothing is lost. Servers do not promise it: they hold text back, in the middle of a character or of
what may become a stop string, and many tell no tokens at all.

    server ── text, tokens ──► waiting ── text and tokens that agree ──► passed on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.engines.openai.vocabulary import Vocabulary

__all__ = ["Logprobs", "Released", "Transcript"]

PREFIXES = 64  # of the waiting tokens that are tried, each in turn
MOST_WAITING = 1024  # tokens: servers hold back no more text than that of a stop string
REPLACEMENT = "\ufffd"  # the text of an incomplete character
Logprobs = list[dict[str, Any]]


@dataclass(slots=True)
class Released:
    """Text that may be passed on, with its tokens and their log probabilities."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)


class Transcript:
    """The output of one generation, after the tokens `before`.

    With `told`, the server tells the tokens. Without, and from the moment on at which its tokens
    contradict its text, they are made from the text: `exact` is False then. Such tokens may be
    others than those that the server sampled, but their text is the same. They are cut where there
    would be more than `most`, with their text; `full` says so, and nothing is passed on after it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        before: Sequence[int],
        *,
        told: bool,
        skip_special: bool,
        most: int,
    ) -> None:
        self.exact = told
        self.full = False
        self._left = most  # tokens that may still be passed on
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special if skip_special else frozenset[int]()
        self._context = vocabulary.recent(before, self._skipped)
        self._tokens: list[int] = []  # told, not yet passed on
        self._text = ""  # the same
        self._logprobs: Logprobs = []

    def push(
        self, tokens: Sequence[int], text: str, logprobs: Logprobs, *, last: bool = False
    ) -> Released:
        """Add what the server has sent; return what may be passed on, all if it is the `last`.

        Nothing has to continue after that, and a stop string may have cut the text in the middle of
        a token.
        """
        self._text += text
        self._logprobs += logprobs
        if self.exact:
            self._tokens += tokens
        if last:
            return self._rest()
        if self.exact:
            count, length = self._agreeing()
            if self.exact:
                return self._release(self._tokens[:count], length, count)
        return self._remade()

    def _rest(self) -> Released:
        tokens = self._tokens
        if not self.exact:
            remade = self._remade()
            if remade.text or not self._text:
                remade.logprobs += self._logprobs
                return remade
            tokens = next(iter(self._vocabulary.encodings(self._text)), [])
            if len(tokens) > self._left:
                return self._cut(tokens)
        return Released(tokens, self._text, self._logprobs)

    def _agreeing(self) -> tuple[int, int]:
        """Return how many of the told tokens have had all their text, and its length."""
        tokens, text = self._tokens, self._text
        before = self._vocabulary.text(self._context)
        if len(tokens) > MOST_WAITING:
            self._contradicted()
            return 0, 0
        if self._after(before, tokens) == text:
            return len(tokens), len(text)
        best = (0, 0)
        for count in range(1, min(len(tokens), PREFIXES) + 1):
            part = self._after(before, tokens[:count])
            if part is not None and text.startswith(part):
                best = (count, len(part))
                continue
            if part is None or part.endswith(REPLACEMENT):
                continue  # an incomplete character, which later tokens complete
            if not part.startswith(text) and not part.rstrip(REPLACEMENT).startswith(text):
                self._contradicted()  # the server says something else
                return 0, 0
            break  # it holds text back
        else:
            all_tried = len(tokens) <= PREFIXES
            if all_tried and best[0] == len(tokens) and len(text) > best[1]:
                self._contradicted()  # text without tokens
                return 0, 0
            if not all_tried and not best[0]:
                self._contradicted()  # no character is so long
                return 0, 0
        return best

    def _contradicted(self) -> None:
        """Trust only the text from now on."""
        self.exact = False
        self._tokens = []

    def _after(self, before: str, tokens: Sequence[int]) -> str | None:
        """Return the text of `tokens` behind the context, whose text is `before`."""
        shown = [token for token in tokens if token not in self._skipped]
        whole = self._vocabulary.text([*self._context, *shown])
        return whole[len(before) :] if whole.startswith(before) else None

    def _remade(self) -> Released:
        """Return tokens for all of the text that waits, if there are any that have this text."""
        if not self._text or self.full:
            return Released()
        before = self._vocabulary.text(self._context)
        for tokens in self._vocabulary.encodings(self._text):
            if self._after(before, tokens) == self._text:
                if len(tokens) > self._left:
                    return self._cut(tokens)
                return self._release(tokens, len(self._text), len(self._logprobs))
        return Released()

    def _cut(self, tokens: list[int]) -> Released:
        """Return as many of the tokens as may be passed on, with their text."""
        self.full = True
        tokens = tokens[: self._left]
        text = self._after(self._vocabulary.text(self._context), tokens) or ""
        if not self._text.startswith(text):  # it ends in the middle of a character
            text = text.rstrip(REPLACEMENT)
        return self._release(tokens, len(text), len(tokens))

    def _release(self, tokens: list[int], length: int, logprobs: int) -> Released:
        out = Released(tokens, self._text[:length], self._logprobs[:logprobs])
        self._left -= len(tokens)
        self._text = self._text[length:]
        self._logprobs = self._logprobs[logprobs:]
        if self.exact:
            self._tokens = self._tokens[len(tokens) :]
        if tokens:
            self._context = self._vocabulary.recent([*self._context, *tokens], self._skipped)
        return out
