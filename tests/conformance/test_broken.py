"""Each check fails for a strategy with a matching defect, and its message names the defect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed import Testbed

from router.conformance import deployment as deployments
from router.conformance.deployment import deployed
from router.conformance.suite import ALL, run_checks

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
HEAD = """
import asyncio, os, time
from dataclasses import replace
import httpx
from engine.protocol import MicroserveError
from router import strategy

seen = {}
"""
PLAIN = """
@strategy
async def NAME(request, cluster):
    BEFORE
    async for chunk in cluster.engines.round_robin().start_generate(request):
        EACH
        yield chunk
"""


@dataclass(frozen=True)
class Broken:
    """A data-parallel strategy with one defect. The check named `check` reports `says`."""

    name: str
    check: str
    says: str
    before: str = "pass"
    each: str = "pass"
    whole: str = ""

    @property
    def source(self) -> str:
        body = self.whole or PLAIN.replace("BEFORE", self.before).replace("EACH", self.each)
        return HEAD + body.replace("NAME", self.name)


def sampled(**changes: str) -> str:
    """Return code that changes sampling parameters of the request."""
    update = ", ".join(f"{name!r}: {value}" for name, value in changes.items())
    return f"request = replace(request, sampling=request.sampling.model_copy(update={{{update}}}))"


BROKEN = (
    Broken(
        "cuts_prompts", "lengths", "token_ids differ from number 1 on",
        before="request = replace(request, prompt=request.prompt[-299:])",
    ),
    Broken(
        "wrong_begin", "lengths", "strategy wrong_begin (generation 1): begin",
        whole="""
@strategy
async def NAME(request, cluster):
    decode = cluster.decode.least_loaded()
    prefill = cluster.prefill.least_loaded(exclude=decode)
    async with decode.prep_recv(request, end=-1) as kv:
        begin = max(kv.match_len, 16 * (kv.end > 16))
        await prefill.remote_send(request, kv, begin=begin, end=kv.end)
        async for chunk in decode.start_generate(request, begin=-1, kv=kv):
            yield chunk
""",
    ),
    Broken(
        "drops_a_token", "lengths", "token_ids are 11, not 12",
        each="if chunk.finish_reason: chunk.token_ids = chunk.token_ids[:-1]",
    ),
    Broken(
        "wrong_finish", "lengths", "finish_reason is 'stop', not 'length'",
        each="if chunk.finish_reason: chunk.finish_reason = 'stop'",
    ),
    Broken(
        "all_was_cached", "lengths", "prompt tokens were cached",
        each="if chunk.usage: chunk.usage.cached_tokens = 1",
    ),
    Broken("blocks", "lengths", "held up the event loop", before="time.sleep(2)"),
    Broken("ends_the_router", "lengths", "Server disconnected", before="os._exit(3)"),
    Broken(
        "leaves_a_lease", "lengths", "a lease on engine-",
        before="""engine = cluster.engines.least_loaded()
    body = {'request_id': 'mine', 'prompt': [1, 2, 3], 'end': 2}
    async with httpx.AsyncClient(verify=False) as http:
        await http.post(engine._backend.url + '/microserving/prep_recv', json=body)""",
    ),
    Broken(
        "skews_the_load", "lengths", "the router counts load on engine-",
        before="next(iter(cluster.engines))._backend.load.tokens += 1",
    ),
    Broken(
        "answers_from_memory", "prefixes", "differ from number 0 on",
        whole="""
@strategy
async def NAME(request, cluster):
    chunks = seen.setdefault(tuple(request.prompt[:32]), [])
    if chunks:
        for chunk in chunks:
            yield chunk
        return
    async for chunk in cluster.engines.round_robin().start_generate(request):
        chunks.append(chunk)
        yield chunk
""",
    ),
    Broken("ignores_the_seed", "sampling", "token_ids differ", before=sampled(seed="0")),
    Broken(
        "ignores_penalties", "penalties", "token_ids differ",
        before=sampled(repetition_penalty="1.0", presence_penalty="0.0"),
    ),
    Broken(
        "lags_by_one", "one_token", "ended before the stream did",
        whole="""
@strategy
async def NAME(request, cluster):
    last = None
    async for chunk in cluster.engines.round_robin().start_generate(request):
        if last is not None:
            yield last
            if chunk.finish_reason:
                yield chunk
        last = chunk
""",
    ),
    Broken(
        "one_choice", "choices", "choice 1: token_ids differ",
        whole="""
@strategy
async def NAME(request, cluster):
    sampling = request.sampling.model_copy(update={"choice": 0})
    request = replace(request, sampling=sampling)
    cluster._attempt.choices = None
    async for chunk in cluster.engines.round_robin().start_generate(request):
        yield chunk
""",
    ),
    Broken(
        "rounds_logprobs", "logprobs", "logprobs token_logprobs differ from number 0 on",
        each="for one in chunk.logprobs or (): one['logprob'] = round(one['logprob'], 4)",
    ),
    Broken("does_not_stop", "stops", "[stop ", before=sampled(stop="[]")),
    Broken("ignores_the_form", "structure", "differ", before=sampled(structure="None")),
    Broken(
        "one_for_all", "together", "of 16 at once",
        before="""global now
    now = request
    await asyncio.sleep(0.05)
    request = replace(request, prompt=now.prompt)""",
    ),
    Broken(
        "needs_two", "roles", "IndexError: list index out of range (FILE.py:",
        before="list(cluster.engines)[1]",
    ),
    Broken(
        "does_not_leave", "clients_that_leave", "swallowed its cancellation",
        whole="""
@strategy
async def NAME(request, cluster):
    try:
        async for chunk in cluster.engines.round_robin().start_generate(request):
            yield chunk
    except asyncio.CancelledError:
        pass
""",
    ),
    Broken(
        "begins_again", "streams_that_break", "token_ids",
        before="request = replace(request, output=[])",
    ),
    Broken(
        "gives_up", "callees_that_die", "ended before the stream did",
        whole="""
@strategy
async def NAME(request, cluster):
    try:
        async for chunk in cluster.engines.round_robin().start_generate(request):
            yield chunk
    except MicroserveError:
        return
""",
    ),
    Broken(
        "always_there", "engines_that_die_later", "it was here before (FILE.py:14)",
        before="""seen.setdefault('where', next(iter(cluster.engines)).id)
    if not any(engine.id == seen['where'] for engine in cluster.engines):
        raise RuntimeError('it was here before')""",
    ),
)  # fmt: skip
SLOW = ("cuts_prompts", "skews_the_load", "blocks", "begins_again", "one_for_all", "needs_two")


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(broken, marks=[pytest.mark.thorough] * (broken.name in SLOW), id=broken.name)
        for broken in BROKEN
    ],
)
async def test_each_check_finds_its_defect(
    tiny: Testbed, broken: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "SETTLE_S", 0.5)
    file = tmp_path / f"{broken.name}.py"
    file.write_text(broken.source)
    (check,) = [check for check in ALL if check.__name__ == broken.check]
    async with deployed(tiny.engines, str(file)) as deployment:
        (result,) = [result async for result in run_checks(deployment, tiny.oracle, [check])]
    for engine in tiny.engines if broken.name == "leaves_a_lease" else ():
        await engine.die()  # otherwise the leaked lease lasts 30 s
        await engine.start()
    assert broken.says.replace("FILE", broken.name) in result.problem


async def test_every_check_has_a_strategy_that_fails_it() -> None:
    assert {broken.check for broken in BROKEN} == {check.__name__ for check in ALL}
