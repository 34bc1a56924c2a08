"""The answer of an OpenAI server, event by event, checked against what was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from router.base import Chunk, EngineUnreachable
from router.engines.openai.errors import error_in_stream
from router.engines.openai.events import CompletionEvent, Part, read_logprobs, usage_of
from router.engines.openai.transcript import Logprobs, Released, Transcript
from router.engines.openai.vocabulary import Vocabulary

__all__ = ["Answer", "Asked"]

EMPTY_EVENTS = 1024  # events that may come beside one for each token
# Characters of text: longer than any token's, and what may come without tokens.
TEXT_PER_TOKEN, TEXT_ALONE = 4096, 1 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What a completion was asked for.

    `prompt`, `before`: how many tokens the prompt has, and how many were emitted earlier.
    `chunk_tokens`, `interval_s`: how many tokens a chunk has at least, and the time between two.
    """

    prompt: int
    before: int
    max_tokens: int  # further ones
    logprobs: int | None = None
    ids: str = "text"  # where the server tells the tokens: `Dialect.ids`
    chunk_tokens: int = 1
    interval_s: float = 0.0


class Answer:
    """What has come of an answer. `last` is its end, once that is there; its usage follows.

    Matching tokens with text takes longer than all the rest, so it is done per chunk, not per
    event. `waiting` is how many events have come since the last `release`.
    """

    def __init__(self, asked: Asked, transcript: Transcript, vocabulary: Vocabulary) -> None:
        self.events = self.waiting = 0
        self.last: Chunk | None = None
        self._asked = asked
        self._transcript = transcript
        self._vocabulary = vocabulary
        self._new: tuple[list[int], list[str], Logprobs] = ([], [], [])
        self._tokens = 0  # that the server has told
        self._logprobs = 0  # of how many tokens it has told log probabilities
        self._text = TEXT_ALONE + TEXT_PER_TOKEN * asked.max_tokens  # characters that may come

    def release(self) -> Chunk | None:
        """Return what may be passed on before the end, if there is anything.

        It is the end if the text has more tokens than were asked for.
        """
        if not self.waiting:
            return None
        chunk = self._chunk(self._matched())
        if self._transcript.full:
            self.last = Chunk([], "", finish_reason="length")
        return chunk if chunk.token_ids or chunk.text else None

    def take(self, event: CompletionEvent) -> None:
        """Add an event.

        Raises the server's error, and `EngineUnreachable` for what was not asked for.
        """
        self.events += 1
        if (failure := event.failure) is not None:
            raise error_in_stream(failure)
        asked = self._asked
        if self.events > asked.max_tokens + EMPTY_EVENTS:
            raise EngineUnreachable("the server sent more events than it may generate tokens")
        for part in event.choices:
            if part.index:
                raise EngineUnreachable("the server sent an answer that nobody asked for")
            if self.last is None:
                self._add(part)
        usage = usage_of(event, prompt=asked.prompt, before=asked.before, most=asked.max_tokens)
        if self.last is not None and usage is not None:
            self.last.usage = usage

    def _add(self, part: Part) -> None:
        asked, text = self._asked, part.text or ""
        logprobs = []
        if part.logprobs and (asked.logprobs is not None or asked.ids == "logprobs"):
            logprobs = read_logprobs(
                part.logprobs,
                self._vocabulary,
                asked.logprobs or 0,
                most=asked.max_tokens - self._logprobs,
            )
            self._logprobs += len(logprobs)
        ids = self._ids(part, [one["token_id"] for one in logprobs])
        self._tokens += len(ids)
        self._text -= len(text)
        if self._tokens > asked.max_tokens:
            raise EngineUnreachable("the server sent more than max_tokens tokens")
        if self._text < 0:
            raise EngineUnreachable("the server sent more text than its tokens can have")
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary.size:
            raise EngineUnreachable("the server sent a token outside the vocabulary")
        if asked.logprobs is None:
            logprobs = []
        elif len(logprobs) == len(ids):
            for one, token in zip(logprobs, ids, strict=True):
                one["token_id"] = token
        elif logprobs and asked.ids == "token_ids":
            raise EngineUnreachable(
                f"the server sent log probabilities of {len(logprobs)} tokens with {len(ids)}"
            )
        finished = part.finished
        new_ids, new_text, new_logprobs = self._new
        new_ids += ids
        new_text.append(text)
        new_logprobs += logprobs
        self.waiting += 1
        if finished is None:
            return
        stop = part.stop_reason
        self.last = self._chunk(self._matched(last=True))
        if self._transcript.full:
            finished, stop = "length", None
        self.last.finish_reason = finished
        self.last.stop_reason = stop[:TEXT_PER_TOKEN] if isinstance(stop, str) else stop

    def _matched(self, *, last: bool = False) -> Released:
        (ids, text, logprobs), self._new = self._new, ([], [], [])
        self.waiting = 0
        return self._transcript.push(ids, "".join(text), logprobs, last=last)

    def _ids(self, part: Part, of_logprobs: list[int]) -> list[int]:
        """Return the tokens that the server tells; none if it tells only their text."""
        if self._asked.ids == "logprobs":
            return of_logprobs
        return (part.token_ids or []) if self._asked.ids == "token_ids" else []

    def _chunk(self, released: Released) -> Chunk:
        logprobs = released.logprobs if self._asked.logprobs is not None else None
        return Chunk(released.tokens, released.text, logprobs=logprobs)
