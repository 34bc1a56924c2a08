"""`microserve bench`: a load generator for running servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from engine.protocol import BadRequest, MicroserveError
from router.cli.options import CA_HELP, GroupedCommand, Number, ServerUrl, option, read_ca
from router.cli.workload_options import POSITIVE, workload_of, workload_options
from router.engines import HttpClient
from router.load import Outcome, Target, closed_loop, open_loop, show, summarize
from router.telemetry import Slo
from router.workload import Workload

__all__ = ["bench"]

NOT_NEGATIVE = Number(float, 0.0, 1e12)
OF_FILES = ("jsonl", "mooncake")  # kinds that `--workload` takes together with `--file`


@click.command(cls=GroupedCommand)
@option("--url", type=ServerUrl(), default="http://127.0.0.1:8000", show_default=True,
        group="Server", help="URL of the server under load")  # fmt: skip
@option("--model", default="", group="Server", help="model name  [default: the first one listed]")
@option("--api-key", default="", group="Server", help="key that the server asks for")
@option("--ca", default="", metavar="FILE", group="Server", help=CA_HELP)
@option("--timeout", "timeout_s", type=POSITIVE, default=600.0, show_default=True, group="Server",
        help="total time of a request (s)")  # fmt: skip
@workload_options(*OF_FILES)
@option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), group="Workload",
        help="file of the workloads jsonl and mooncake")  # fmt: skip
@option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, group="Workload",
        help="generate all output tokens, past an end of sequence (vLLM's extension)",
)  # fmt: skip
@option("--rate", type=POSITIVE, group="Arrivals", help="open loop: requests per second")
@option("--concurrency", type=click.IntRange(1), default=8, show_default=True, group="Arrivals",
        help="closed loop (no --rate, no trace): number of concurrent clients")  # fmt: skip
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
    workload = _workload(options)
    requests = itertools.islice(workload.requests, options["requests"] or workload.count or 100)
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
        if workload.timed:
            return await open_loop(target, requests)
        return await closed_loop(target, requests, options["concurrency"])
    finally:
        client.close()


def _workload(options: dict[str, Any]) -> Workload:
    """Return the workload. Raises `BadRequest`."""
    kind, file = options["workload"], options["file"]
    if (kind in OF_FILES) != (file is not None):
        raise BadRequest("--file goes with the workloads jsonl and mooncake, which require it")
    workload = workload_of(options if file is None else {**options, "workload": str(file)})
    if file is not None and workload.kind != kind:
        raise BadRequest(f"{file} is of the kind {workload.kind}, not {kind}")
    return workload


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
