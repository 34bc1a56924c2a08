"""What every check does: ask, compare with the oracle, and say what was wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import httpx

from router.conformance.answers import Answer, Refused, ask, difference
from router.conformance.deployment import Deployment

__all__ = ["CheckFailed", "Trial"]

TOKENS = (20, 500)  # which every model has, and in none of which they are special
LOOK_S = 0.002
_numbers = itertools.count(1)


class CheckFailed(Exception):
    """What the strategy did, and in which scene."""


class Trial:
    """One check, by its name, of one deployment; `requests` counts those of its strategy.

    Prompts are drawn by the names of both: the same in each run, and cold unless asked twice.
    """

    def __init__(self, name: str, deployment: Deployment, oracle: Deployment) -> None:
        """`oracle` has one engine."""
        self.deployment = deployment
        self.requests = 0
        self._oracle = oracle
        self._name = f"{deployment.label}/{name}"
        self._salts = itertools.count()

    def prompt(self, length: int) -> list[int]:
        """One that no other begins like."""
        source = random.Random(f"{self._name}/{next(self._salts)}")  # noqa: S311  the same each run
        return [source.randrange(*TOKENS) for _ in range(length)]

    async def same(self, scene: str, body: dict[str, Any]) -> Answer:
        """Ask for it cold, and warm as a stream; both must be the oracle's answer, which it
        returns. Raises `CheckFailed`."""
        wanted = await self.wanted(body)
        cold = await self.one(f"{scene}, cold", body, wanted)
        self._counts_cached(f"{scene}, cold", cold, wanted, cold=True)
        warm = await self.one(f"{scene}, warm", {**body, "stream": True}, wanted)
        self._counts_cached(f"{scene}, warm", warm, wanted, cold=False)
        return wanted

    async def one(self, scene: str, body: dict[str, Any], wanted: Answer) -> Answer:
        """Ask once; it must be `wanted`."""
        name = self.name_request()
        try:
            answer = await self.ask(body, name)
        except Refused as error:
            raise CheckFailed(f"{error} [{scene}]") from None
        await self.compare(scene, name, answer, wanted)
        return answer

    async def compare(self, scene: str, name: str, answer: Answer, wanted: Answer) -> None:
        """The answer to the request `name` must be `wanted`."""
        if differs := difference(answer, wanted):
            raise CheckFailed(f"{differs} [{scene}; {await self._legs(name)}]")

    async def wanted(self, body: dict[str, Any]) -> Answer:
        """What one engine alone answers. Raises `CheckFailed`, which would not be the strategy's
        fault."""
        oracle = self._oracle
        try:
            return await ask(oracle.http, oracle.url, {**body, "stream": False}, "oracle")
        except Refused as error:
            raise CheckFailed(f"the single engine does not answer: {error}") from None

    async def ask(self, body: dict[str, Any], name: str) -> Answer:
        """The strategy's answer to a request of this name. Raises `Refused`."""
        self.requests += 1
        return await ask(self.deployment.http, self.deployment.url, body, name)

    def name_request(self) -> str:
        return f"check-{next(_numbers)}"

    async def settle(self, scene: str) -> None:
        """Nothing may be left, on no engine and in the router, and nobody have misbehaved."""
        violations = (await self.deployment.admin("GET", "strategies"))["active"]["offences"]
        if violations:
            raise CheckFailed(f"{self.deployment.violation or violations} [{scene}]")
        if left := await self.deployment.left_over():
            raise CheckFailed(f"it left something behind: {left} [{scene}]")

    async def ended(self, name: str) -> None:
        """Wait until the router is through with the request of this name."""
        while (await self._receipt(name)).get("status") in (None, "running"):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def _legs(self, name: str) -> str:
        """The calls that were made for a request, for people."""
        legs = (await self._receipt(name)).get("legs", [])
        calls = [f"{leg['call']} on {leg['engine']} [{leg['begin']}:{leg['end']}]" for leg in legs]
        return "its calls: " + (", ".join(calls) or "none")

    async def _receipt(self, name: str) -> dict[str, Any]:
        try:
            receipt: dict[str, Any] = await self.deployment.admin("GET", f"requests/{name}")
        except httpx.HTTPStatusError:
            return {}
        return receipt

    @staticmethod
    def _counts_cached(scene: str, answer: Answer, wanted: Answer, *, cold: bool) -> None:
        cached, prompt = answer.cached_tokens, wanted.usage["prompt_tokens"]
        if not 0 <= cached < prompt or (cold and cached):
            of = f"of {prompt}, " + ("of which no engine had any" if cold else "the last of which")
            raise CheckFailed(
                f"usage: it says that {cached} prompt tokens were cached {of} [{scene}]"
            )
