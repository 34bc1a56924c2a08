"""Checks that compare answers with those of a single engine.

Most requests are sent twice: first to cold caches and unstreamed, then warm and streamed. The
docstrings are what `microserve strategy check` prints.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

from router.conformance.check_context import CheckContext, CheckFailed

__all__ = ["CHECKS"]

PAGE = 16
NEW = 12  # generated tokens to compare
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
DRAWN = {**GREEDY, "temperature": 1.0, "seed": 11}
ROLES = (("prefill", "decode", "decode"), ("prefill", "prefill", "decode"))


async def lengths(context: CheckContext) -> None:
    """prompts of one token, part of a page, whole pages and many pages"""
    for length in (1, 2, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 150, 20 * PAGE, 700):
        await context.same(f"{length} tokens", {"prompt": context.prompt(length), **GREEDY})


async def prefixes(context: CheckContext) -> None:
    """prompts that share a prefix, at page boundaries and between"""
    for shared in (2 * PAGE, 100):
        prefix = context.prompt(shared)
        for length in (1, PAGE, 75):
            body = {"prompt": prefix + context.prompt(length), **GREEDY}
            wanted = await context.wanted(body)
            for state in ("first", "again"):
                await context.one(
                    f"{shared} tokens in common, {length} more, {state}", body, wanted
                )


async def sampling(context: CheckContext) -> None:
    """seeded sampling with filters and with a bias"""
    for fields in (
        {"seed": 1},
        {"seed": 2, "top_p": 0.8, "top_k": 40},
        {"seed": 3, "temperature": 0.7, "min_p": 0.02, "logit_bias": {"65": 4.0, "66": -100}},
    ):
        await context.same(str(fields), {"prompt": context.prompt(60), **DRAWN, **fields})


async def penalties(context: CheckContext) -> None:
    """penalties, which depend on all preceding tokens"""
    for fields in (
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7, "temperature": 1.0, "seed": 5},
    ):
        body = {"prompt": context.prompt(40), **GREEDY, **fields, "max_tokens": 2 * NEW}
        await context.same(str(fields), body)


async def one_token(context: CheckContext) -> None:
    """answers of a single token"""
    for length in (1, PAGE, 90):
        body = {"prompt": context.prompt(length), **GREEDY, "max_tokens": 1}
        await context.same(f"{length} tokens", body)


async def choices(context: CheckContext) -> None:
    """n = 3, and several prompts in one request"""
    for length in (1, 5 * PAGE + 3):
        wanted = await context.same("n = 3", {"prompt": context.prompt(length), **DRAWN, "n": 3})
        if len({choice["text"] for choice in wanted.choices.values()}) < 3:
            raise CheckFailed("the single engine's three choices are equal")
    both = {"prompt": [context.prompt(20), context.prompt(50)], **DRAWN, "n": 2}
    await context.same("two prompts, n = 2", both)


async def logprobs(context: CheckContext) -> None:
    """log probabilities, equal to the last bit"""
    for fields in (GREEDY, DRAWN):
        await context.same(
            "5 alternatives", {"prompt": context.prompt(70), **fields, "logprobs": 5}
        )


async def stops(context: CheckContext) -> None:
    """stop strings within and across tokens, kept and removed; stop tokens"""
    prompt = context.prompt(50)
    plain = (await context.wanted({"prompt": prompt, **DRAWN, "logprobs": 0})).choices[0]
    pieces = plain["logprobs"]["tokens"]
    for stop in (pieces[4], pieces[5][-1:] + pieces[6][:1], plain["text"][-3:]):
        for kept in (False, True):
            body = {"prompt": prompt, **DRAWN, "stop": stop, "include_stop_str_in_output": kept}
            wanted = await context.wanted(body)
            for state in ("first", "again"):
                await context.one(f"stop {stop!r}, {state}", body, wanted)
    body = {"prompt": context.prompt(30), **DRAWN, "stop_token_ids": list(range(0, 400, 7))}
    await context.same("stop tokens", body)


async def structure(context: CheckContext) -> None:
    """response_format, if the engines support it"""
    if importlib.util.find_spec("xgrammar") is None:
        return
    schema = {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    for sampling in (GREEDY, DRAWN):
        body = {"prompt": context.prompt(40), **sampling, "response_format": form}
        await context.same("a JSON schema", {**body, "ignore_eos": False, "max_tokens": 3 * NEW})


async def together(context: CheckContext) -> None:
    """16 concurrent requests, short and long, streamed and not"""
    bodies = [
        {
            "prompt": context.prompt(1 + 23 * number),
            **DRAWN,
            "seed": number,
            "stream": number % 2 > 0,
        }
        for number in range(16)
    ]
    wanted = [await context.wanted(body) for body in bodies]
    async with asyncio.TaskGroup() as requests:
        for number, (body, answer) in enumerate(zip(bodies, wanted, strict=True)):
            requests.create_task(context.one(f"request {number} of 16 at once", body, answer))


async def roles(context: CheckContext) -> None:
    """engines with roles; two of three engines draining"""
    names = [engine.name for engine in context.deployment.engines]

    async def change(name: str, body: dict[str, Any]) -> None:
        await context.deployment.admin("PATCH", f"engines/{name}", body)

    async def look(scene: str) -> None:
        for length in (3, 130):
            await context.same(scene, {"prompt": context.prompt(length), **DRAWN, "n": 2})

    try:
        for given in ROLES:
            for name, role in zip(names, given, strict=True):
                await change(name, {"role": role})
            await look("engines " + ", ".join(given))
        for name in names[1:]:
            await change(name, {"draining": True})
        await look("one engine left")
    finally:
        for name in names:
            await change(name, {"role": "any", "draining": False})


CHECKS = (
    lengths, prefixes, sampling, penalties, one_token, choices, logprobs, stops, structure,
    together, roles,
)  # fmt: skip
