"""Limits of requests and tokens per minute for each API key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.admission.keys import ANYBODY, Key
from router.base import RateLimited
from router.store import Bucket

__all__ = ["Bucket", "RateLimits"]


@dataclass(slots=True)
class _Allowance:
    requests: Bucket | None
    tokens: Bucket | None

    def limited(self) -> list[tuple[str, Bucket]]:
        """Return what is limited, with its bucket."""
        both = (("requests", self.requests), ("tokens", self.tokens))
        return [(what, bucket) for what, bucket in both if bucket is not None]

    def check(self, now: float) -> None:
        """Raise `RateLimited`, with the time to wait, if a bucket holds less than 1."""
        for what, bucket in self.limited():
            if (wait := bucket.until(1.0, now)) > 0:
                raise RateLimited(
                    f"over the limit of {bucket.limit} {what} a minute; try again in {wait:.1f} s",
                    limit=what,
                    retry_after_s=wait,
                )


class RateLimits:
    """Admits requests within the limits of their keys.

    A request counts on arrival, its tokens when they are known: the prompt's when it has been
    read, the answer's at the end. So a key may exceed its tokens by what it has in flight, and
    waits longer afterwards.
    """

    def __init__(
        self,
        requests_per_minute: int,
        tokens_per_minute: int,
        clock: Callable[[], float],
        *,
        parts: int = 1,
    ) -> None:
        """The limits apply to keys without limits of their own; 0 means none.

        `clock` returns seconds. All limits are divided by `parts`.
        """
        self.parts = parts
        self._defaults = (requests_per_minute, tokens_per_minute)
        self._limited = any(self._defaults)
        self._clock = clock
        self._allowances: dict[Key, _Allowance] = {}

    def admit(self, key: Key) -> None:
        """Count a request. Raises `RateLimited`, with the time to wait, if it exceeds a limit."""
        if not self._limits(key):
            return
        allowance, now = self._allowance(key), self._clock()
        allowance.check(now)
        if allowance.requests is not None:
            allowance.requests.take(1.0, now)

    async def arrive(self, key: Key) -> None:
        """As `admit`; a subclass may have to ask for it."""
        self.admit(key)

    def charge(self, key: Key, tokens: int) -> None:
        """Count tokens."""
        if self._limits(key) and (bucket := self._allowance(key).tokens) is not None:
            bucket.take(tokens, self._clock())

    def headers(self, key: Key) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit-*` headers for the limits of `key`."""
        headers: dict[str, str] = {}
        if not self._limits(key):
            return headers
        allowance, now = self._allowance(key), self._clock()
        for what, bucket in allowance.limited():
            headers[f"x-ratelimit-limit-{what}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level(now))))
            headers[f"x-ratelimit-reset-{what}"] = duration(bucket.until(bucket.limit, now))
        return headers

    def keep(self, keys: list[Key]) -> None:
        """Forget the state of all other keys."""
        good = {*keys, ANYBODY}
        for key in [key for key in self._allowances if key not in good]:
            del self._allowances[key]

    def _limits(self, key: Key) -> bool:
        """Return whether `key` may have limits: a quick check, since most have none."""
        return self._limited or bool(key.requests_per_minute or key.tokens_per_minute)

    def _allowance(self, key: Key) -> _Allowance:
        if (known := self._allowances.get(key)) is None:
            now = self._clock()
            own = (key.requests_per_minute, key.tokens_per_minute)
            limits = [
                mine if mine is not None else all
                for mine, all in zip(own, self._defaults, strict=True)
            ]
            requests, tokens = (
                Bucket(max(1, round(limit / self.parts)), now) if limit else None
                for limit in limits
            )
            known = self._allowances[key] = _Allowance(requests, tokens)
        return known


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1e3)}ms"
    if round(seconds, 1) < 60:
        return f"{round(seconds, 1):g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
