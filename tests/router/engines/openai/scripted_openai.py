"""An OpenAI server in this process that emits a fixed text, in the ways in which servers differ."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.engines.http_client import HttpClient
from router.engines.openai import Descriptions, OpenAIEngine, ServerAddress
from router.model import ModelFiles

__all__ = ["FILES", "TEXT", "TOKENIZER", "ScriptedOpenAI", "connected", "said"]

TEXT = "Grüße aus 世界, \N{GRINNING FACE}! The quick brown fox. "
MODEL = {"id": "m", "max_model_len": 512}
SPECIAL = ["<|end|>", "<|user|>"]


def byte_level() -> Tokenizer:
    """Return a tokenizer of one token per byte, two merges, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*SPECIAL, *alphabet, "th", "Th"])}
    merges = [("t", "h"), ("T", "h")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return tokenizer


TOKENIZER = byte_level()
IDS: list[int] = TOKENIZER.encode(TEXT).ids
FILES = ModelFiles(
    tokenizer_json=TOKENIZER.to_str(), chat_template="{{ messages[0].content }}", bos_token=None,
    eos_token="<|end|>", eos_token_ids=(0,), add_bos=False,
    vocab_size=TOKENIZER.get_vocab_size(), context_length=2048,
)  # fmt: skip


def said(begin: int, count: int) -> list[int]:
    """Return the tokens that every server samples at `count` positions from `begin` on."""
    return list(itertools.islice(itertools.cycle(IDS), begin, begin + count))


@dataclass
class ScriptedOpenAI:
    """One server. The token at a position of prompt and output is the same on all of them.

    `ids`: how it tells the tokens of a stream. `knows`: fields whose types it checks; `strict`: it
    refuses the others. `lag`: tokens whose text it holds back. `refuse`: replies to the next
    requests, `(status, body, headers)`. `cut_after`: after so many tokens the next streams break.
    `gate`: what a stream waits for after its first event.
    """

    ids: str = "token_ids"
    knows: frozenset[str] = frozenset({"top_k", "min_p", "ignore_eos", "return_token_ids"})
    strict: bool = False
    takes_tokens: bool = True
    lag: int = 0
    closes: bool = False  # its connections, after a refusal
    health: int = 200
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "m", "max_model_len": 512}]
    )
    more: dict[str, tuple[int, Any]] = field(default_factory=dict)  # replies to other paths
    refuse: list[tuple[int, Any, dict[str, str]]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    events_instead: list[str] = field(default_factory=list)  # lines of the next streams
    tail: bool = True  # usage and [DONE]
    details: dict[str, Any] = field(default_factory=dict)  # of the usage
    gate: asyncio.Event | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    left: int = 0  # clients that left in mid-stream
    url: str = ""

    @property
    def streams(self) -> list[dict[str, Any]]:
        """The requests for more than one token: no probes."""
        return [one for one in self.requests if one["max_tokens"] > 1]

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        if self.refuse:
            status, said, headers = self.refuse.pop(0)
            text = said if isinstance(said, str) else json.dumps(said)
            return web.Response(status=status, text=text, headers=headers)
        for name, value in body.items():
            known = name in self.knows | STANDARD
            if (not known and self.strict) or (name in self.knows and value in WRONG):
                return web.json_response(
                    {"error": {"message": f"bad {name}", "param": name}}, status=400
                )
        if not self.takes_tokens and not isinstance(body["prompt"], str):
            return web.json_response({"error": "prompt: expected a string"}, status=422)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "x", "finish_reason": "length"}]})
        response = web.StreamResponse()
        await response.prepare(http)
        self.running += 1
        try:
            await self._stream(body, response.write, http)
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        finally:
            self.running -= 1
        return response

    def _refused(self, error: dict[str, Any]) -> web.Response:
        """Refuse a request. With `closes` the reply promises to keep the connection."""
        response = web.json_response(error, status=400)
        if self.closes:
            response.force_close()
            response.headers["Connection"] = "keep-alive"
        return response

    async def _stream(
        self, body: dict[str, Any], write: Callable[[bytes], Awaitable[None]], http: web.Request
    ) -> None:
        if self.events_instead and body["max_tokens"] > 1:
            await write(self.events_instead.pop(0).encode())
            return
        prompt, most = body["prompt"], body["max_tokens"]
        if isinstance(prompt, str):
            prompt = TOKENIZER.encode(prompt).ids
        cut = self.cut_after.pop(0) if self.cut_after and most > 1 else None
        tokens = said(len(prompt), most)
        stop = (body.get("stop") or [None])[0]
        told = 0
        for count in range(1, most + 1):
            if cut is not None and count > cut:
                http.transport.abort()
                return
            whole = TOKENIZER.decode(tokens[:count])
            last = count == most
            found = whole.find(stop) if stop else -1
            if found >= 0:
                whole, last = whole[:found], True
            shown = whole if last else TOKENIZER.decode(tokens[: max(0, count - self.lag)])
            if not last:
                shown = shown.rstrip("\ufffd")
            choice: dict[str, Any] = {"index": 0, "text": shown[told:], "finish_reason": None}
            told = max(told, len(shown))
            if last:
                choice["finish_reason"] = "stop" if found >= 0 else "length"
                choice["stop_reason"] = stop if found >= 0 else None
            token = tokens[count - 1]
            if self.ids == "token_ids" and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if body.get("logprobs") is not None:
                choice["logprobs"] = self._logprobs(token, body)
            await write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if self.gate is not None and most > 1:
                await self.gate.wait()
            if last:
                break
        if self.tail:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, **self.details}
            await write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await write(b"data: [DONE]\n\n")

    def _logprobs(self, token: int, body: dict[str, Any]) -> dict[str, Any]:
        piece = TOKENIZER.decode([token], skip_special_tokens=False)
        if self.ids == "logprobs":
            one = {"id": token, "token": piece, "bytes": [], "logprob": -0.5}
            return {"content": [{**one, "top_logprobs": [one, {**one, "id": 3, "logprob": -1.5}]}]}
        if body.get("return_tokens_as_token_ids") and "return_tokens_as_token_ids" in self.knows:
            piece = f"token_id:{token}"
        return {"tokens": [piece], "token_logprobs": [-0.5], "top_logprobs": [{piece: -0.5}]}

    async def other(self, http: web.Request) -> web.Response:
        if http.path == "/health":
            return web.Response(status=self.health)
        if http.path == "/v1/models":
            return web.json_response({"object": "list", "data": self.models})
        status, body = self.more.get(http.path, (404, ""))
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[ScriptedOpenAI]:
        """Listen while the body runs."""
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/{path:.*}", self.other)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"openai+http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


WRONG = ("none", 5, {"regex": 5}, {"type": "none"})
STANDARD = frozenset({
    "model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "logprobs",
    "stream_options", "presence_penalty", "frequency_penalty", "logit_bias",
})  # fmt: skip


@asynccontextmanager
async def connected(
    server: ScriptedOpenAI | str,
    files: ModelFiles | None = FILES,
    *,
    known: bool = True,
    **keys: Any,
) -> AsyncIterator[OpenAIEngine]:
    """Yield the calls to a server whose model has been read (`known`)."""
    address = ServerAddress.parse(server if isinstance(server, str) else server.url)
    http = HttpClient(address.base, **keys)
    try:
        async with asyncio.TaskGroup() as tasks:
            engine = OpenAIEngine(address, http, Descriptions(files), tasks)
            if known:
                await engine.model()
            yield engine
    finally:
        http.close()
