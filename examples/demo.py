"""Shows two strategies on two engines, and a strategy swap in the middle of a stream.

It runs `microserve up` on the CPU in float32 and asks a question under `data_parallel`. While a
second answer is streaming, it swaps the strategy to `prefill_decode`. Then it asks both questions
again and compares the tokens. The tables are the router's own receipts.

Run: `make demo`, or `python examples/demo.py [MODEL]`. The last line is `demo ok`. Otherwise the
last line says what went wrong, and the exit status is 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

QUESTION = "What is the capital of France?"
STORY = "Tell me a short story about a lighthouse and a storm."
START_TIMEOUT_S = 100.0

console = Console(highlight=False)


class DemoError(Exception):
    """The demonstration did not go as it should."""


@dataclass
class Answer:
    """A streamed answer: its X-Request-Id, text and tokens."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)


@contextmanager
def cluster(model: str) -> Iterator[str]:
    """Run `microserve up` on a free port and yield the router's URL. No process is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.json"
        up = subprocess.Popen(  # noqa: S603  our own program
            [
                *(sys.executable, "-m", "router", "up", model),
                *("--engines", "2", "--dtype", "float32", "--strategy", "data_parallel"),
                *("--port", "0", "--state-file", str(state)),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not state.exists():
                if up.poll() is not None:
                    raise DemoError(f"`microserve up` ended with {up.returncode}")
                if time.monotonic() > deadline:
                    raise DemoError(f"not ready after {START_TIMEOUT_S:g} s")
                time.sleep(0.05)
            yield json.loads(state.read_text())["router"]["url"]
        finally:
            up.terminate()
            up.wait()


def ask(
    client: httpx.Client,
    request_id: str,
    prompt: str,
    max_tokens: int,
    after: tuple[int, Callable[[], None]] | None = None,
) -> Answer:
    """Stream an answer to the terminal.

    `after` is a number of tokens, and a function to call once they have arrived.
    """
    answer = Answer(request_id)
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    console.print(f"  [bold]{prompt}[/bold]")
    console.print("  ", end="")
    headers = {"X-Request-Id": request_id}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.is_error:
            raise DemoError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise DemoError(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                console.print(text, end="", markup=False, style="green", soft_wrap=True)
                answer.text += text
                answer.token_ids += choice.get("token_ids", [])
            if after is not None and len(answer.token_ids) >= after[0]:
                after[1]()
                after = None
    console.print("\n")
    return answer


def call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    response = client.request(method, path, json=body)
    if response.is_error:
        raise DemoError(f"{method} {path}: {response.text}")
    return response.json()


def time_line(client: httpx.Client, answer: Answer) -> dict[str, Any]:
    """Print the legs of a request in a table, and return its receipt."""
    receipt: dict[str, Any] = call(client, "GET", f"/admin/requests/{answer.request_id}")
    table = Table(
        title=f"{answer.request_id}: {receipt['strategy']}, generation {receipt['generation']}",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in (
        "at_ms",
        "leg",
        "engine",
        "range",
        "cached",
        "computed",
        "bytes_put",
        "tokens",
        "ms",
    ):
        left = column in ("leg", "engine")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for leg in receipt["legs"]:
        table.add_row(
            f"{leg['start_ms']:.0f}",
            leg["call"],
            leg["engine"],
            f"{leg['begin']}:{leg['end']}",
            str(leg["match_len"] if leg["match_len"] is not None else leg["cached_tokens"]),
            str(leg["computed_tokens"] or ""),
            f"{leg['bytes']:,}" if leg["bytes"] else "",
            str(leg["tokens"] or ""),
            f"{leg['ms']:.1f}",
        )
    console.print(table)
    console.print()
    return receipt


def check_same(first: Answer, second: Answer) -> None:
    """Check that two answers have the same tokens. Raises `DemoError` if not."""
    pair = f"{first.request_id} and {second.request_id}"
    if not first.token_ids or first.token_ids != second.token_ids:
        raise DemoError(f"{pair} differ: {first.token_ids} and {second.token_ids}")
    console.print(f"tokens of {pair} identical: [bold]yes[/bold] ({len(first.token_ids)} tokens)")


def show(url: str) -> None:
    """Run the demonstration on a router at `url`."""
    with httpx.Client(base_url=url, timeout=60.0) as client:

        def swap() -> None:
            done = call(client, "PUT", "/admin/strategy", {"name": "prefill_decode"})
            console.print(f"[yellow]‹swap to generation {done['generation']}›[/yellow]", end="")

        console.rule("data_parallel", align="left")
        question = ask(client, "question-1", QUESTION, 16)
        time_line(client, question)
        story = ask(client, "story-1", STORY, 48, after=(12, swap))
        receipt = time_line(client, story)
        if receipt["generation"] != 1:
            raise DemoError("the strategy of the story changed in mid-stream")

        console.rule("prefill_decode", align="left")
        story_again = ask(client, "story-2", STORY, 48)
        receipt = time_line(client, story_again)
        if not any(leg["bytes"] for leg in receipt["legs"]):
            raise DemoError("prefill_decode transferred no KV")
        question_again = ask(client, "question-2", QUESTION, 16)
        time_line(client, question_again)

        console.rule(align="left")
        check_same(question, question_again)
        check_same(story, story_again)


def main() -> int:
    began = time.monotonic()
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    try:
        with cluster(model) as url:
            console.print(
                f"two engines and a router are ready after {time.monotonic() - began:.1f} s"
            )
            show(url)
    except (DemoError, httpx.HTTPError, OSError) as error:
        console.print(f"\ndemo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\ndemo interrupted")
        return 130
    console.print(f"{time.monotonic() - began:.1f} s in total")
    console.print("demo ok")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
