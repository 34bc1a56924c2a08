"""`microserve bench`: a load generator for running servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from engine.protocol import BadRequest, MicroserveError
from router.cli.options import CA_HELP, GroupedCommand, Number, option, read_ca
from router.engines import HttpClient
from router.load import Outcome, Slo, Target, closed_loop, open_loop, show, summarize
from router.workload import (
    WORKLOADS,
    LoadRequest,
    evenly,
    fixed,
    jsonl,
    long,
    mooncake,
    poisson,
    sharegpt,
)

__all__ = ["bench"]

POSITIVE = Number(float, 1e-9, 1e12)
NOT_NEGATIVE = Number(float, 0.0, 1e12)


@click.command(cls=GroupedCommand)
@option("--url", default="http://127.0.0.1:8000", show_default=True, group="Server",
        help="URL of the server under load")  # fmt: skip
@option("--model", default="", group="Server", help="model name  [default: the first one listed]")
@option("--api-key", default="", group="Server", help="key that the server asks for")
@option("--ca", default="", metavar="FILE", group="Server", help=CA_HELP)
@option("--timeout", "timeout_s", type=POSITIVE, default=600.0, show_default=True, group="Server",
        help="total time of a request (s)")  # fmt: skip
@option("--workload", type=click.Choice(WORKLOADS), default="fixed", show_default=True,
        group="Workload", help="kind of requests")  # fmt: skip
@option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), group="Workload",
        help="input of the workloads jsonl and mooncake")  # fmt: skip
@option("--input", "input_", type=click.IntRange(1), group="Workload",
        help="prompt tokens per request  [default: 256; long: 4096]")  # fmt: skip
@option("--output", type=click.IntRange(1), default=64, show_default=True, group="Workload",
        help="output tokens per request")  # fmt: skip
@option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, group="Workload",
        help="generate all output tokens, past an end of sequence (vLLM's extension)",
)  # fmt: skip
@option("--scale", type=POSITIVE, default=1.0, show_default=True, group="Workload",
        help="factor for the lengths of a mooncake trace")  # fmt: skip
@option("--requests", type=click.IntRange(1), group="Workload",
        help="number of requests  [default: 100; a trace: all]")  # fmt: skip
@option("--seed", type=int, default=0, show_default=True, group="Workload",
        help="seed of lengths, tokens and arrival times")  # fmt: skip
@option("--rate", type=POSITIVE, group="Arrivals", help="open loop: requests per second")
@option("--arrivals", type=click.Choice(["poisson", "fixed"]), default="poisson",
        show_default=True, group="Arrivals", help="open loop: distribution of arrivals",
)  # fmt: skip
@option("--concurrency", type=click.IntRange(1), default=8, show_default=True, group="Arrivals",
        help="closed loop (no --rate, no trace): number of concurrent clients")  # fmt: skip
@option("--speed", type=POSITIVE, default=1.0, show_default=True, group="Arrivals",
        help="trace: factor by which arrivals are faster")  # fmt: skip
@option("--slo-ttft-ms", type=NOT_NEGATIVE, group="Goodput",
        help="objective for the time to first token (ms)")  # fmt: skip
@option("--slo-tpot-ms", type=NOT_NEGATIVE, group="Goodput",
        help="objective for the time per output token after the first (ms)")  # fmt: skip
def bench(**options: Any) -> None:
    """Put load on a server and measure its responses.

    The server has the OpenAI API; times are those that its clients see. Prints tables, and one
    JSON document as the last line of standard output. Runs with the same seed send the same
    requests at the same times.
    """
    try:
        outcomes = asyncio.run(_run(options))
    except MicroserveError as error:
        raise click.ClickException(error.message) from None
    figures = summarize(outcomes, Slo(options["slo_ttft_ms"], options["slo_tpot_ms"]))
    title = f"{options['workload']} on {options['url']}"
    show(title, figures, Console(stderr=False, width=100))
    hidden = {"api_key"}
    settings = {name: value for name, value in options.items() if name not in hidden}
    click.echo(json.dumps({"bench": "load", "settings": settings, **figures}, default=str))


async def _run(options: dict[str, Any]) -> list[Outcome]:
    requests, trace = _requests(options)
    url = options["url"].rstrip("/").removesuffix("/v1")
    secure = url.startswith("https:")
    client = HttpClient(
        url,
        api_key=options["api_key"],
        connect_timeout_s=options["timeout_s"],
        tls=read_ca(options["ca"]) or (ssl.create_default_context() if secure else None),
    )
    try:
        target = Target(
            client,
            options["model"] or await _first_model(client),
            {"ignore_eos": True, "temperature": 0} if options["ignore_eos"] else {"temperature": 0},
            options["timeout_s"],
        )
        if options["rate"]:
            rate, seed = options["rate"], options["seed"]
            times = poisson(seed, rate) if options["arrivals"] == "poisson" else evenly(rate)
            return await open_loop(target, requests, times)
        if trace:
            known = list(requests)
            times = iter([(request.at_s or 0.0) / options["speed"] for request in known])
            return await open_loop(target, iter(known), times)
        return await closed_loop(target, requests, options["concurrency"])
    finally:
        client.close()


def _requests(options: dict[str, Any]) -> tuple[Iterator[LoadRequest], bool]:
    """Return the requests, and whether they bring arrival times. Raises `BadRequest`."""
    kind, seed, output = options["workload"], options["seed"], options["output"]
    count, path = options["requests"], options["file"]
    if (kind in ("jsonl", "mooncake")) != (path is not None):
        raise BadRequest("--file goes with the workloads jsonl and mooncake, which require it")
    if kind == "mooncake":
        return itertools.islice(mooncake(path, seed, options["scale"]), count), True
    if kind == "jsonl":
        requests = jsonl(path, output)
    elif kind == "sharegpt":
        requests = sharegpt(seed)
    elif kind == "long":
        requests = long(seed, options["input_"] or 4096, output)
    else:
        requests = fixed(seed, options["input_"] or 256, output)
    return itertools.islice(requests, count or 100), False


async def _first_model(client: HttpClient) -> str:
    """Return the model that the server lists first. Raises `BadRequest` if it lists none."""
    reply = await client.call("GET", "/v1/models")
    if reply.status == 401:
        raise BadRequest(f"{client.url} asks for a key (401): use --api-key")
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        message = f"{client.url} lists no model ({reply.status}): use --model"
        raise BadRequest(message) from None
