"""What a check uses: prompts, requests, comparison with the oracle, and a look for leftovers."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import httpx

from router.conformance.answers import Answer, RequestFailed, complete, difference
from router.conformance.deployment import Deployment

__all__ = ["CheckContext", "CheckFailed"]

TOKENS = (20, 500)  # token ids that every model has, and that are special in none
POLL_S = 0.002
ROUNDING = 1e-5  # engines that are split differently add the same numbers in another order
_numbers = itertools.count(1)


class CheckFailed(Exception):
    """The strategy misbehaved. The message says how, and in which scene."""


class CheckContext:
    """One run of one check on a deployment. `requests` counts the strategy's requests.

    Prompts are seeded by the names of deployment and check, so each run draws the same ones, and no
    prompt is in a cache unless the check sends it twice.
    """

    def __init__(self, check: str, deployment: Deployment, oracle: Deployment) -> None:
        """`oracle` has one engine."""
        self.deployment = deployment
        self.requests = 0
        self._oracle = oracle
        self._rounding = ROUNDING if any(each.flags for each in deployment.engines) else 0.0
        self._name = f"{deployment.label}/{check}"
        self._salts = itertools.count()

    def prompt(self, length: int) -> list[int]:
        """Draw a prompt that shares no prefix with others."""
        source = random.Random(f"{self._name}/{next(self._salts)}")  # noqa: S311  not secret
        return [source.randrange(*TOKENS) for _ in range(length)]

    async def same(self, scene: str, body: dict[str, Any]) -> Answer:
        """Send a request cold, then warm and streamed. Return the oracle's answer.

        Raises `CheckFailed` if either answer differs from the oracle's.
        """
        wanted = await self.wanted(body)
        cold = await self.one(f"{scene}, cold", body, wanted)
        self._check_cached_tokens(f"{scene}, cold", cold, wanted, cold=True)
        warm = await self.one(f"{scene}, warm", {**body, "stream": True}, wanted)
        self._check_cached_tokens(f"{scene}, warm", warm, wanted, cold=False)
        return wanted

    async def one(self, scene: str, body: dict[str, Any], wanted: Answer) -> Answer:
        """Send a request once. Raises `CheckFailed` if the answer is not `wanted`."""
        request_id = self.new_request_id()
        try:
            answer = await self.send(body, request_id)
        except RequestFailed as error:
            raise CheckFailed(f"{error} [{scene}]") from None
        await self.compare(scene, request_id, answer, wanted)
        return answer

    async def compare(self, scene: str, request_id: str, answer: Answer, wanted: Answer) -> None:
        """Raise `CheckFailed` if the answer to the request is not `wanted`."""
        if differs := difference(answer, wanted, self._rounding):
            raise CheckFailed(f"{differs} [{scene}; {await self._legs(request_id)}]")

    async def wanted(self, body: dict[str, Any]) -> Answer:
        """Return the oracle's answer.

        Raises `CheckFailed` if there is none, although that is not the strategy's fault.
        """
        oracle = self._oracle
        try:
            return await complete(oracle.http, oracle.url, {**body, "stream": False}, "oracle")
        except RequestFailed as error:
            raise CheckFailed(f"the single engine does not answer: {error}") from None

    async def send(self, body: dict[str, Any], request_id: str) -> Answer:
        """Return the strategy's answer. Raises `RequestFailed`."""
        self.requests += 1
        return await complete(self.deployment.http, self.deployment.url, body, request_id)

    def new_request_id(self) -> str:
        return f"check-{next(_numbers)}"

    async def settle(self, scene: str) -> None:
        """Raise `CheckFailed` for a violation by the strategy, or for anything that is left over on
        an engine or in the router."""
        violations = (await self.deployment.admin("GET", "strategies"))["active"]["offences"]
        if violations:
            raise CheckFailed(f"{self.deployment.violation or violations} [{scene}]")
        if left := await self.deployment.left_over():
            raise CheckFailed(f"it left something behind: {left} [{scene}]")

    async def ended(self, request_id: str) -> None:
        """Wait until the router has finished the request."""
        while (await self._receipt(request_id)).get("status") in (None, "running"):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _legs(self, request_id: str) -> str:
        """Describe the engine calls of a request."""
        legs = (await self._receipt(request_id)).get("legs", [])
        calls = [f"{leg['call']} on {leg['engine']} [{leg['begin']}:{leg['end']}]" for leg in legs]
        return "its calls: " + (", ".join(calls) or "none")

    async def _receipt(self, request_id: str) -> dict[str, Any]:
        try:
            receipt: dict[str, Any] = await self.deployment.admin("GET", f"requests/{request_id}")
        except httpx.HTTPStatusError:
            return {}
        return receipt

    @staticmethod
    def _check_cached_tokens(scene: str, answer: Answer, wanted: Answer, *, cold: bool) -> None:
        cached, prompt = answer.cached_tokens, wanted.usage["prompt_tokens"]
        if not 0 <= cached < prompt or (cold and cached):
            most = "and no engine had any" if cold else "and the last one is always computed"
            raise CheckFailed(
                f"usage: it says that {cached} of {prompt} prompt tokens were cached, {most} "
                f"[{scene}]"
            )
