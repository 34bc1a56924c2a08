"""The admin API's advice: which strategy would serve the recorded traffic best."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Response
from pydantic import Field

from engine.protocol import MicroserveError
from router.advice import Asked, Question
from router.api.admin.access import Body, check_upload
from router.api.errors import error_json
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import Http, Sent, reply
from router.telemetry import Slo

__all__ = ["routes"]

STREAM_HEADERS = [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-cache")]
Minutes = Annotated[float, Field(gt=0.0, le=10_080.0)]
Objective = Annotated[float, Field(gt=0.0, le=1e9)]


class Tried(Body):
    """A strategy to compare, with its parameters.

    `source`: run this one, which need not be loaded; it has the strategy `name` in it.
    """

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    source: Annotated[str, Field(min_length=1)] | None = None


class Advise(Body):
    """What to compare, and for which traffic.

    `candidates`: all strategies if left out; a name alone means the default parameters.
    `keep_roles`: do not try other roles of the engines.
    `slo_…_ms`: with one of them, more goodput is better, else a shorter mean time of a request.
    `profile`: the JSON of a latency profile, for engines whose own steps do not suffice. `seeds`:
    runs of each candidate. `stream`: events tell of the progress.
    """

    minutes: Minutes = 15.0
    candidates: Annotated[list[Tried | str], Field(max_length=64)] | None = None
    keep_roles: bool = False
    slo_ttft_ms: Objective | None = None
    slo_tpot_ms: Objective | None = None
    profile: dict[str, Any] | None = None
    seeds: Annotated[int, Field(ge=2, le=20)] = 5
    stream: bool = False


def routes(router: Router) -> APIRouter:
    """Return `/admin/advise`."""
    api = api_router("Strategies")

    @api.post(
        "/admin/advise",
        response_model=dict[str, Any],
        responses={200: {"content": {"text/event-stream": {}}}, **errors(404, 409, 500)},
    )
    async def advise(http: Http, wanted: Advise) -> Response:
        """Rank strategies by how they would serve the router's latest traffic.

        They run in virtual time, on engines as fast as the router's own. This takes a minute or
        more, and changes nothing. It ends when the client leaves.
        """
        question = _question(wanted)
        if any(one.source is not None for one in question.candidates or ()):
            check_upload(router)
        if not wanted.stream:
            return reply(await router.advisor.advise(question, _quietly))
        stream = http.stream(STREAM_HEADERS)

        async def tell(done: int, total: int, title: str) -> None:
            about = {"done": done, "total": total, "candidate": title}
            await stream.write(b"data: %b\n\n" % orjson.dumps({"progress": about}))

        try:
            advice = await router.advisor.advise(question, tell)
        except MicroserveError as error:
            if not stream.begun:
                raise
            await stream.end(b"data: %b\n\n" % error_json(error))
        else:
            data = orjson.dumps({"advice": advice}, option=orjson.OPT_NON_STR_KEYS)
            await stream.end(b"data: %b\n\n" % data)
        return Sent()

    return api


def _question(wanted: Advise) -> Question:
    tried = wanted.candidates
    return Question(
        minutes=wanted.minutes,
        candidates=None if tried is None else [_asked(one) for one in tried],
        keep_roles=wanted.keep_roles,
        slo=Slo(wanted.slo_ttft_ms, wanted.slo_tpot_ms),
        profile=wanted.profile,
        seeds=wanted.seeds,
    )


def _asked(one: Tried | str) -> Asked:
    return Asked(one) if isinstance(one, str) else Asked(one.name, one.params, one.source)


async def _quietly(done: int, total: int, title: str) -> None:
    """Tell nobody of the progress."""
