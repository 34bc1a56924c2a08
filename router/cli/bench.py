"""`microserve bench`: load on a running server, and what it makes of it."""

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
from router.engines.http_client import HttpClient
from router.load.arrivals import evenly, poisson
from router.load.client import Outcome, Target, closed_loop, open_loop
from router.load.report import Slo, show, summarize
from router.load.workload import WORKLOADS, Ask, fixed, jsonl, long, mooncake, sharegpt

__all__ = ["bench"]


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="of the server")
@click.option("--model", default="", help="its model  [default: the first that it lists]")
@click.option("--api-key", default="", help="of the server")
@click.option("--workload", type=click.Choice(WORKLOADS), default="fixed", show_default=True)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="of the workloads jsonl and mooncake")  # fmt: skip
@click.option(
    "--input", "input_", type=click.IntRange(1), help="tokens in  [default: 256; long: 4096]"
)
@click.option("--output", type=click.IntRange(1), default=64, show_default=True, help="tokens out")
@click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="of the lengths of a mooncake trace")  # fmt: skip
@click.option("--requests", type=click.IntRange(1), help="how many  [default: 100; a trace: all]")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="of an open loop, in requests/s"
)
@click.option("--arrivals", type=click.Choice(["poisson", "fixed"]), default="poisson",
              show_default=True, help="of an open loop")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True,
              help="of a closed loop: without --rate, and without a trace's own times")  # fmt: skip
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="how much faster than it was to replay a trace")  # fmt: skip
@click.option(
    "--slo-ttft-ms", type=click.FloatRange(0), help="goodput: to the first token, at most"
)
@click.option(
    "--slo-tpot-ms", type=click.FloatRange(0), help="goodput: per token after it, at most"
)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True,
              help="let all answers have their length (vLLM's extension)")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=600.0,
              show_default=True, help="of a request (s)")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="of lengths, tokens and times")
def bench(**options: Any) -> None:
    """Put load on any OpenAI-style server and measure it from outside.

    Prints a table, and as the last line of standard output one JSON document. The same seed makes
    the same requests at the same times.
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
    asks, trace = _asks(options)
    url = options["url"].rstrip("/").removesuffix("/v1")
    client = HttpClient(
        url,
        api_key=options["api_key"],
        connect_timeout_s=options["timeout_s"],
        tls=ssl.create_default_context() if url.startswith("https:") else None,
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
            return await open_loop(target, asks, times)
        if trace:
            known = list(asks)
            times = iter([(ask.at_s or 0.0) / options["speed"] for ask in known])
            return await open_loop(target, iter(known), times)
        return await closed_loop(target, asks, options["concurrency"])
    finally:
        client.close()


def _asks(options: dict[str, Any]) -> tuple[Iterator[Ask], bool]:
    """The requests, and whether they have times of their own. Raises `BadRequest`."""
    kind, seed, output = options["workload"], options["seed"], options["output"]
    count, path = options["requests"], options["file"]
    if (kind in ("jsonl", "mooncake")) != (path is not None):
        raise BadRequest("--file goes with the workloads jsonl and mooncake, and these need it")
    if kind == "mooncake":
        return itertools.islice(mooncake(path, seed, options["scale"]), count), True
    if kind == "jsonl":
        asks = jsonl(path, output)
    elif kind == "sharegpt":
        asks = sharegpt(seed)
    elif kind == "long":
        asks = long(seed, options["input_"] or 4096, output)
    else:
        asks = fixed(seed, options["input_"] or 256, output)
    return itertools.islice(asks, count or 100), False


async def _first_model(client: HttpClient) -> str:
    reply = await client.call("GET", "/v1/models")
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        message = f"{client.url} lists no model ({reply.status}): name it by --model"
        raise BadRequest(message) from None
