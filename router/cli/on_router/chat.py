"""`microserve chat`: answers from a running router, printed as they arrive."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import httpx

from router.base import DONE, EventSplitter
from router.cli.on_router.admin_client import unreachable
from router.cli.options import CA_HELP, GroupedCommand, Number, ServerUrl, option, read_ca

__all__ = ["chat"]

Messages = list[dict[str, str]]


@click.command(cls=GroupedCommand)
@click.argument("prompt", required=False)
@option("--url", type=ServerUrl(), default="http://127.0.0.1:8000", show_default=True,
        group="Server", help="the router's URL")  # fmt: skip
@option("--api-key", default="", group="Server", help="key that the router asks for")
@option("--ca", default="", metavar="FILE", group="Server", help=CA_HELP)
@option("--system", default="", group="Generation", help="system message")
@option("--max-tokens", type=click.IntRange(min=1), group="Generation",
        help="longest answer in tokens")  # fmt: skip
@option("--temperature", type=Number(float, 0.0, 2.0), default=0.0, show_default=True,
        group="Generation", help="sampling temperature; 0: greedy")  # fmt: skip
def chat(
    prompt: str | None,
    url: str,
    api_key: str,
    ca: str,
    system: str,
    max_tokens: int | None,
    temperature: float,
) -> None:
    """Send PROMPT and print the answer as it arrives.

    Without PROMPT, chat turn by turn at a terminal, or read the prompt from standard input.
    """
    options: dict[str, Any] = {"temperature": temperature, "stream": True}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    messages: Messages = [{"role": "system", "content": system}] if system else []
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    verify = read_ca(ca) or True
    with httpx.Client(base_url=url, headers=headers, timeout=None, verify=verify) as client:  # noqa: S113
        if prompt is None and sys.stdin.isatty():
            _talk(client, messages, options)
        else:
            text = prompt if prompt is not None else sys.stdin.read()
            _ask(client, [*messages, {"role": "user", "content": text}], options)


def _talk(client: httpx.Client, messages: Messages, options: dict[str, Any]) -> None:
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text.strip():
            messages.append({"role": "user", "content": text})
            answer = _ask(client, messages, options)
            messages.append({"role": "assistant", "content": answer})


def _ask(client: httpx.Client, messages: Messages, options: dict[str, Any]) -> str:
    """Print the answer as it arrives, and return it. Raises `ClickException`."""
    answer = ""
    try:
        body = {"messages": messages, **options}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise click.ClickException(_message(response.text))
            events = EventSplitter()
            for received in response.iter_bytes():
                for data in events.feed(received):
                    answer += _print(data)
    except httpx.HTTPError as error:
        raise unreachable(str(client.base_url), error) from None
    click.echo()
    return answer


def _print(data: bytes) -> str:
    """Print the text of one event and return it. Raises `ClickException`."""
    if data == DONE:
        return ""
    event = json.loads(data)
    if "error" in event:
        raise click.ClickException(_message(data.decode()))
    text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    click.echo(text, nl=False)
    return text


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]
