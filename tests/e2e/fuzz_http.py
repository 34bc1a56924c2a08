"""Send a deployment what its fields do not expect, for some minutes.

It starts `microserve up tiny` and calls router and engines, in random order: every field of every
call with each hostile value (numbers that no machine has, half characters, deep nesting, long
lists, grammars that explode). A defect is an answer 500, an error without an error object, a call
without an answer, and a loop that stands still: while the calls run, `/health` of each process must
answer within two seconds. At the end the engines must be at rest. Prints the defects and, as the
last line, one JSON document.

python tests/e2e/fuzz_http.py --minutes 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from e2e_deployment import Deployment, deployed

SILENT_S = 2.0  # a loop that does not answer `/health` for longer stood still
CALL_S = 30.0
MEMORY_MIB = 1500  # of one process
REFUSED = {502, 503, 504}  # 5xx answers that say that something else failed, or is full


def deep(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "1" + closing * depth


# Values as JSON text, because some are no value of Python's.
HOSTILE = [
    "null", "true", "-1", "0", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "5e-324", "1e308",
    str(2**31), str(2**63 - 1), str(2**63), str(2**64 - 1), str(2**64), "9" * 5000, "1" + "0" * 400,
    '""', '" "', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\ufffe\u202e\U0001f600"',
    '"' + "x" * 200_000 + '"', '"' + "\\u00e9" * 1000 + '"',
    "[]", "{}", "[[]]", "[null]", '[""]', '[{"a": 1}]', '{"": 1}', '{"a": {"b": [1e999]}}',
    deep("[", "]", 400), deep("[", "]", 5000), deep('{"a":', "}", 400), deep('{"a":', "}", 5000),
    "[" + ",".join(["1"] * 100_000) + "]", "[" + ",".join(['"x"'] * 100_000) + "]",
    "[" + ",".join(['["x", 1]'] * 20_000) + "]",
    "{" + ",".join(f'"{n}": 1' for n in range(100_000)) + "}",
    '{"%s": 1}' % ("9" * 5000), '{"-1": 1, "1.5": 2, "²": 3}', '{"5": 1, "5": 2}',
]  # fmt: skip
SCHEMAS = [
    deep('{"items":', "}", 400).replace("1", "{}"), '{"type": ["object", "object"]}',
    '{"$ref": "#"}', '{"allOf": [{"$ref": "#"}]}', '{"$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"type": "string", "pattern": "(a{1,1000}){1,1000}"}', '{"maxLength": 1000000000}',
    '{"type": "string", "minLength": 100000, "maxLength": 1000000}',
    '{"type": "array", "minItems": 100000, "items": {"type": "integer"}}',
    '{"enum": [' + ",".join(f'"{n}"' for n in range(5000)) + "]}",
    '{"properties": {' + ",".join(f'"p{n}": {{"type": "integer"}}' for n in range(1000)) + "}}",
]  # fmt: skip
PATTERNS = [
    "(a{1,1000}){1,1000}", "(a*)*b", "(a|a)*b", "a{1000000}", "[a-z]{1,100000}", "(x+x+)+y",
    "\\p{L}{1,5000}", "(?=a)b",
    "(?<n>a)\\k<n>", "(" * 90 + "a" + ")" * 90, "a" * 100_000, "[", "\\",
    "(((a{1,30}){1,30}){1,30}){1,30}", "|".join(f"w{n}" for n in range(10_000)),
]  # fmt: skip
GRAMMARS = [
    'root ::= root "x"', 'root ::= "a" root | root', "root ::= (((" + '"a" ' * 20_000 + ")))",
    'root ::= ' + " ".join(f"r{n}" for n in range(3000)) + "\n"
    + "\n".join(f'r{n} ::= "{n}" | r{(n + 1) % 3000}' for n in range(3000)),
    'start: "a" start | start', 'root ::= ("a"{1,1000}){1,1000}', "root ::= [", "start: /(/",
]  # fmt: skip
CHAT = '[{"role": "user", "content": "hi"}]'
TOKENS = "[1, 2, 3]"
# Each call: path, and its fields as JSON text with valid values.
ROUTER_CALLS: list[tuple[str, str, dict[str, str]]] = [
    ("POST", "/v1/completions", {"prompt": '"a"', "max_tokens": "2"}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": "2"}),
    ("POST", "/tokenize", {"prompt": '"a"'}),
    ("POST", "/tokenize", {"messages": CHAT}),
    ("POST", "/detokenize", {"tokens": TOKENS}),
    ("PUT", "/admin/strategy", {"name": '"balanced"', "params": '{"ratio": 0.5}'}),
    ("POST", "/admin/engines", {"url": '"http://127.0.0.1:9"', "id": '"odd"'}),
    ("PATCH", "/admin/engines/engine-0", {"labels": '{"a": "b"}'}),
    ("POST", "/admin/migrate", {"prefix": TOKENS, "from": '"engine-0"', "to": '"engine-1"'}),
    ("POST", "/admin/strategies", {"source": '"1/0"', "file": '"x.py"'}),
]
LENDING = {"debtor": '"d"', "epoch": "1", "creditor_epoch": "1"}
ENGINE_CALLS: list[tuple[str, str, dict[str, str]]] = [
    ("POST", f"/microserving/{name}", fields)
    for name, fields in {
        "prep_recv": {"request_id": '"@"', "prompt": TOKENS, "end": "2"},
        "remote_send": {
            "request_id": '"@"', "prompt": TOKENS, "begin": "0", "end": "2", "kv_addr": '"x"',
        },
        "start_generate": {"request_id": '"@"', "prompt": TOKENS, "max_tokens": "2"},
        "mirror": {"request_id": '"@"', "kv_addr": '"x"'},
        "extend": {"kv_addr": '"x"', "reserve": "1"},
        "commit": {"lease_id": '"x"'},
        "pin": {"prompt": TOKENS},
        "unpin": {"prompt": TOKENS},
        "release": {"request_id": '"@"'},
        "lend/allocate": {**LENDING, "lease_id": '"x"', "size": "1"},
        "lend/free": {**LENDING, "lease_id": '"x"', "pages": "[1]"},
        "lend/renew": {**LENDING, "lease_ids": '["x"]'},
    }.items()
]  # fmt: skip
# Fields of which the descriptions are nested: their inner fields, each with `%` for the value.
INNER = {
    "/v1/completions": {
        "response_format": [
            '{"type": %}', '{"type": "json_schema", "json_schema": %}',
            '{"type": "json_schema", "json_schema": {"name": "n", "schema": %}}',
            '{"type": "json_schema", "json_schema": {"name": %, "schema": {}}}',
        ],
        "structured_outputs": [f'{{"{kind}": %}}' for kind in (
            "json", "regex", "choice", "grammar", "json_object")],
        "stream_options": ['{"include_usage": %}'],
        "logit_bias": ['{"5": %}'],
        "stop": ["[%]"], "prompt": ["[%]", '["a", %]', "[[1, %]]"],
    },
    "/v1/chat/completions": {
        "messages": [
            '[{"role": %, "content": "hi"}]', '[{"role": "user", "content": %}]',
            '[{"role": "user", "content": [%]}]', '[{"role": "user", "content": "hi", "extra": %}]',
            '[{"role": "user", "content": [{"type": "image_url", "image_url": %}]}]',
            '[{"role": "user", "content": [{"type": "text", "text": %}]}]',
        ],
        "chat_template_kwargs": [f'{{"{name}": %}}' for name in (
            "x", "messages", "self", "bos_token", "add_generation_prompt", "raise_exception")],
        "tools": ['[{"type": "function", "function": %}]'],
    },
    "/microserving/start_generate": {
        "structure": ['{"kind": "regex", "source": %}', '{"kind": %, "source": "a"}'],
        "logit_bias": ['{"5": %}'], "mirror": ['{"kv_addr": %}'],
    },
}  # fmt: skip
HEADERS: list[tuple[str, bytes]] = [
    (name, value)
    for name in ("X-Request-Id", "X-Session-ID", "X-Priority", "X-Request-Timeout", "Accept",
                 "traceparent", "tracestate", "Authorization", "Content-Type", "X-Unknown")
    for value in (b"", b"\xff\xfe", "ü".encode(), b"9" * 5000, b"nan", b"1e999", b"-1", b"\xc3",
                  b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-\xff")
]  # fmt: skip


@dataclass
class Fuzz:
    """The calls to one deployment, and the defects that they show."""

    deployment: Deployment
    until: float
    client: dict[str, str]  # headers of calls to `/v1`
    statuses: Counter[int] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    last: str = ""
    # Reading certificates would take longer than a call.
    http: httpx.Client = field(default_factory=lambda: httpx.Client(verify=False))

    def call(
        self, base: str, method: str, path: str, body: bytes, headers: dict[str, Any] | None = None
    ) -> None:
        shown = f"{method} {path} {body[:160]!r}{'…' if len(body) > 160 else ''} {headers or ''}"
        self.last = shown
        began = time.monotonic()
        try:
            reply = self.http.request(
                method,
                base + path,
                content=body,
                headers={"Content-Type": "application/json", **self._key(base, path)}
                | (headers or {}),
                timeout=CALL_S,
            )
        except httpx.TimeoutException:
            self.defect(f"no answer within {CALL_S:g} s: {shown}")
            return
        except httpx.HTTPError as error:
            self.defect(f"{type(error).__name__}: {shown}")
            return
        took = time.monotonic() - began
        self.slowest = sorted([*self.slowest, (took, shown)], reverse=True)[:5]
        self.statuses[reply.status_code] += 1
        if reply.status_code >= 500 and reply.status_code not in REFUSED:
            self.defect(f"{reply.status_code} {reply.text[:300]}: {shown}")
        elif reply.status_code >= 400 and not _is_error(reply):
            self.defect(f"{reply.status_code} without an error object {reply.text[:200]}: {shown}")

    def _key(self, base: str, path: str) -> dict[str, str]:
        if base != self.deployment.url:
            return self.deployment.engines[0].headers
        return self.deployment.admin if path.startswith("/admin") else self.client

    def defect(self, what: str) -> None:
        self.defects.append(what)
        print(what, file=sys.stderr, flush=True)

    def run(self, calls: list[tuple[str, str, str, bytes, dict[str, Any]]]) -> None:
        for base, method, path, body, headers in calls:
            if time.monotonic() > self.until:
                return
            self.call(base, method, path, body, headers)

    def watch(self, stop: threading.Event) -> None:
        """Ask each process for its health, several times a second, and for its memory."""
        targets = [(self.deployment.url, self.deployment.pid)]
        targets += [(engine.url, engine.pid) for engine in self.deployment.engines]
        with httpx.Client(timeout=60, verify=False) as http:
            while not stop.wait(0.2):
                for url, pid in targets:
                    during, began = self.last, time.monotonic()
                    with suppress(httpx.HTTPError):
                        http.get(f"{url}/health")
                    if (took := time.monotonic() - began) > SILENT_S:
                        self.defect(f"{url} stood still for {took:.1f} s, about: {during}")
                    if (mib := _resident_mib(pid)) > MEMORY_MIB:
                        self.defect(f"{url} takes {mib} MiB, about: {during}")
                        return


def _is_error(reply: httpx.Response) -> bool:
    with suppress(ValueError, TypeError, KeyError):
        return isinstance(reply.json()["error"]["message"], str)
    return False


def _resident_mib(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 // 1024
    return 0


def hostile_calls(
    base: str, described: dict[str, Any], calls: list[tuple[str, str, dict[str, str]]]
) -> Iterator[tuple[str, str, str, bytes, dict[str, Any]]]:
    """Yield each call with each field set to each hostile value."""
    numbers = itertools.count()

    def written(fields: dict[str, str]) -> bytes:
        text = ", ".join(f'"{name}": {value}' for name, value in fields.items())
        return f"{{{text}}}".replace('"@"', f'"fuzz-{next(numbers)}"').encode("utf-8", "replace")

    for method, path, fields in calls:
        for name in sorted({*fields, *_properties(described, method, path), "unknown"}):
            for value in HOSTILE:
                yield base, method, path, written({**fields, name: value}), {}
            for shape in INNER.get(path, {}).get(name, []):
                for value in HOSTILE + [json.dumps(one) for one in PATTERNS + GRAMMARS] + SCHEMAS:
                    body = written({**fields, name: shape.replace("%", value, 1)})
                    yield base, method, path, body, {}
        for broken in ("", "null", "[]", '"x"', "{", deep("[", "]", 100_000), "\ufeff{}"):
            yield base, method, path, broken.encode(), {}
        for name, value in HEADERS:
            yield base, method, path, written(fields), {name: value}


def _properties(described: dict[str, Any], method: str, path: str) -> set[str]:
    """Return the fields of a call's body, by its description."""
    operation = described["paths"].get(path, {}).get(method.lower(), {})
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    found: set[str] = set()
    left = [schema.get("schema", {})]
    while left:
        one = left.pop()
        if name := one.get("$ref", "").rpartition("/")[2]:
            left.append(described.get("components", {}).get("schemas", {}).get(name, {}))
        found |= set(one.get("properties", {}))
        left += [*one.get("anyOf", []), *one.get("allOf", [])]
    return found


def fuzz(deployment: Deployment, minutes: float, client: dict[str, str]) -> Fuzz:
    """Run all hostile calls in random order, for `minutes` at most.

    `client` has the headers of calls to `/v1`.
    """
    state = Fuzz(deployment, time.monotonic() + 60 * minutes, client)
    stop = threading.Event()
    watcher = threading.Thread(target=state.watch, args=(stop,))
    watcher.start()
    try:
        calls = []
        for base, some in (
            (deployment.url, ROUTER_CALLS),
            (deployment.engines[0].url, ENGINE_CALLS),
        ):
            described = httpx.get(
                f"{base}/openapi.json", headers=deployment.engines[0].headers
            ).json()
            calls += hostile_calls(base, described, some)
        random.Random(0).shuffle(calls)
        print(f"{len(calls)} hostile calls", file=sys.stderr, flush=True)
        state.run(calls)
    finally:
        stop.set()
        watcher.join()
    return state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = ("--engines", "2", "--pool-pages", "1024", "--threads", "1", "--allow-upload")
        with deployed(Path(folder), "tiny", *options) as deployment:
            state = fuzz(deployment, flags.minutes, {})
    document = {
        "fuzz_minutes": flags.minutes,
        "statuses": dict(sorted(state.statuses.items())),
        "slowest": [[round(took, 2), shown] for took, shown in state.slowest],
        "defects": state.defects,
    }
    print(json.dumps(document))
    return 1 if state.defects else 0


if __name__ == "__main__":
    sys.exit(main())
