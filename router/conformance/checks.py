"""Checks that compare answers: whatever is asked for, it is what one engine would have answered.

Each is asked twice, cold and warm, whole and as a stream.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

from router.conformance.trial import CheckFailed, Trial

__all__ = ["CHECKS"]

PAGE = 16
NEW = 12  # tokens to compare
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
DRAWN = {**GREEDY, "temperature": 1.0, "seed": 11}
ROLES = (("prefill", "decode", "decode"), ("prefill", "prefill", "decode"))


async def lengths(trial: Trial) -> None:
    """prompts of a token, of less than a page, of whole pages, of many"""
    for length in (1, 2, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 150, 20 * PAGE, 700):
        await trial.same(f"{length} tokens", {"prompt": trial.prompt(length), **GREEDY})


async def prefixes(trial: Trial) -> None:
    """prompts that begin like others, in pages and in between"""
    for shared in (2 * PAGE, 100):
        prefix = trial.prompt(shared)
        for length in (1, PAGE, 75):
            body = {"prompt": prefix + trial.prompt(length), **GREEDY}
            wanted = await trial.wanted(body)
            for state in ("first", "again"):
                await trial.one(f"{shared} tokens in common, {length} more, {state}", body, wanted)


async def sampling(trial: Trial) -> None:
    """what is drawn with a seed, with filters, with a bias"""
    for fields in (
        {"seed": 1},
        {"seed": 2, "top_p": 0.8, "top_k": 40},
        {"seed": 3, "temperature": 0.7, "min_p": 0.02, "logit_bias": {"65": 4.0, "66": -100}},
    ):
        await trial.same(str(fields), {"prompt": trial.prompt(60), **DRAWN, **fields})


async def penalties(trial: Trial) -> None:
    """penalties, which depend on all that came before"""
    for fields in (
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.7, "temperature": 1.0, "seed": 5},
    ):
        body = {"prompt": trial.prompt(40), **GREEDY, **fields, "max_tokens": 2 * NEW}
        await trial.same(str(fields), body)


async def one_token(trial: Trial) -> None:
    """answers of one token: the first is the last"""
    for length in (1, PAGE, 90):
        body = {"prompt": trial.prompt(length), **GREEDY, "max_tokens": 1}
        await trial.same(f"{length} tokens", body)


async def choices(trial: Trial) -> None:
    """n = 3, and several prompts in one request"""
    for length in (1, 5 * PAGE + 3):
        wanted = await trial.same("n = 3", {"prompt": trial.prompt(length), **DRAWN, "n": 3})
        if len({choice["text"] for choice in wanted.choices.values()}) < 3:
            raise CheckFailed("the single engine's three choices are one")
    both = {"prompt": [trial.prompt(20), trial.prompt(50)], **DRAWN, "n": 2}
    await trial.same("two prompts, n = 2", both)


async def logprobs(trial: Trial) -> None:
    """log probabilities, equal to the last bit"""
    for fields in (GREEDY, DRAWN):
        await trial.same("5 alternatives", {"prompt": trial.prompt(70), **fields, "logprobs": 5})


async def stops(trial: Trial) -> None:
    """stop strings within and across tokens, stop tokens, kept in the text and not"""
    prompt = trial.prompt(50)
    plain = (await trial.wanted({"prompt": prompt, **DRAWN, "logprobs": 0})).choices[0]
    pieces = plain["logprobs"]["tokens"]
    for stop in (pieces[4], pieces[5][-1:] + pieces[6][:1], plain["text"][-3:]):
        for kept in (False, True):
            body = {"prompt": prompt, **DRAWN, "stop": stop, "include_stop_str_in_output": kept}
            wanted = await trial.wanted(body)
            for state in ("first", "again"):
                await trial.one(f"stop {stop!r}, {state}", body, wanted)
    body = {"prompt": trial.prompt(30), **DRAWN, "stop_token_ids": list(range(0, 400, 7))}
    await trial.same("stop tokens", body)


async def structure(trial: Trial) -> None:
    """response_format, where the engines have it"""
    if importlib.util.find_spec("xgrammar") is None:
        return
    schema = {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    for sampling in (GREEDY, DRAWN):
        body = {"prompt": trial.prompt(40), **sampling, "response_format": form}
        await trial.same("a JSON schema", {**body, "ignore_eos": False, "max_tokens": 3 * NEW})


async def together(trial: Trial) -> None:
    """16 requests at once, short and long, whole and streamed"""
    bodies = [
        {"prompt": trial.prompt(1 + 23 * number), **DRAWN, "seed": number, "stream": number % 2 > 0}
        for number in range(16)
    ]
    wanted = [await trial.wanted(body) for body in bodies]
    async with asyncio.TaskGroup() as asking:
        for number, (body, answer) in enumerate(zip(bodies, wanted, strict=True)):
            asking.create_task(trial.one(f"request {number} of 16 at once", body, answer))


async def roles(trial: Trial) -> None:
    """engines that are to prefill or to decode; two of three draining"""
    names = [node.name for node in trial.deployment.nodes]

    async def change(name: str, body: dict[str, Any]) -> None:
        await trial.deployment.admin("PATCH", f"engines/{name}", body)

    async def look(scene: str) -> None:
        for length in (3, 130):
            await trial.same(scene, {"prompt": trial.prompt(length), **DRAWN, "n": 2})

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
