"""The shape of the latest requests: arrival, lengths, names of the prompts' first pages.

A name is a digest, so neither texts nor tokens are kept. Sessions get names that are drawn anew by
each process. A request is entered when it ends, with what it was answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from secrets import token_bytes
from typing import NamedTuple

import orjson

from engine.protocol import page_names

__all__ = ["MOST_PAGES", "PAGE", "RecordedRequest", "Traffic", "recording"]

PAGE = 16  # tokens of a page in recordings, whatever the engines' size is
MOST_PAGES = 256  # named of a prompt: prefixes that are longer are shared up to there
NAME_BYTES = 8
ENTRY_BYTES = 320  # of a request beside its pages: objects, times, lengths


class RecordedRequest(NamedTuple):
    """One answer to one prompt."""

    at_s: float  # arrival, by the recorder's clock
    input_tokens: int
    output_tokens: int  # emitted until it ended
    pages: bytes  # names of the first pages, `NAME_BYTES` each
    session: str | None
    strategy: str

    def line(self, start: float) -> bytes:
        """Return it as a line of the format `recorded`, with times since `start`."""
        names, digits = self.pages.hex(), 2 * NAME_BYTES
        fields: dict[str, object] = {
            "at_s": round(self.at_s - start, 6),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "pages": [names[at : at + digits] for at in range(0, len(names), digits)],
            "strategy": self.strategy,
        }
        if self.session is not None:
            fields["session"] = self.session
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


class Traffic:
    """The requests of the latest `seconds`, in `most_bytes` at most; the oldest are dropped."""

    def __init__(
        self, seconds: float, most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """With 0 `seconds` nothing is kept."""
        self.seconds = seconds
        self.bytes = 0
        self._most = most_bytes
        self._clock = clock
        self._requests: deque[RecordedRequest] = deque()
        self._key = token_bytes(16)

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        at_s: float,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[int],
        session: str | None,
        strategy: str,
    ) -> None:
        """Enter a request that arrived at `at_s` and has ended.

        `outputs` are the tokens of each choice of each prompt, prompt by prompt.
        """
        if not self.seconds:
            return
        if session is not None:
            data = session.encode("utf-8", "surrogatepass")
            session = blake2b(data, digest_size=8, key=self._key).hexdigest()
        choices = len(outputs) // len(prompts)
        for number, tokens in enumerate(outputs):
            if not number % choices:
                prompt = prompts[number // choices]
                pages = bytes.fromhex("".join(page_names(prompt[: MOST_PAGES * PAGE], PAGE)))
            self._requests.append(
                RecordedRequest(at_s, len(prompt), tokens, pages, session, strategy)
            )
            self.bytes += ENTRY_BYTES + len(pages)
        self._drop()

    def latest(self, seconds: float) -> list[RecordedRequest]:
        """Return the requests that arrived in the latest `seconds`, in the order of arrival."""
        oldest = self._clock() - min(seconds, self.seconds)
        found = [request for request in self._requests if request.at_s >= oldest]
        return sorted(found, key=_arrival)

    def _drop(self) -> None:
        requests, oldest = self._requests, self._clock() - self.seconds
        while requests and (self.bytes > self._most or requests[0].at_s < oldest):
            self.bytes -= ENTRY_BYTES + len(requests.popleft().pages)


def recording(requests: Sequence[RecordedRequest], piece: int) -> Iterator[bytes]:
    """Yield the lines of the format `recorded`, about `piece` bytes at a time."""
    gathered: list[bytes] = []
    size = 0
    for request in requests:
        gathered.append(request.line(requests[0].at_s))
        size += len(gathered[-1])
        if size >= piece:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _arrival(request: RecordedRequest) -> float:
    return request.at_s
