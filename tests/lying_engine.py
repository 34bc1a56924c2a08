"""An engine that lies: it answers like an engine, except for one thing.

    python tests/lying_engine.py --lie endless_line --port 8199 --like http://127.0.0.1:8101

`--like` names a real engine, whose model it claims to have. It speaks raw HTTP, because no HTTP
server sends most of this. `SILENT` are the lies that emit no token: in a fleet with a real model
they must change no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BLOCK = b"x" * (64 << 10)
# A chunk of valid changes of the prefix cache, which come to nothing.
NAMES = [f"{number:016x}" for number in range(1000)]
ADDED, REMOVED = ({"added": a, "removed": b} for a, b in ((NAMES, []), ([], NAMES)))
LINES = b"".join(json.dumps(change).encode() + b"\n" for change in (ADDED, REMOVED))
CHANGES = b"%x\r\n%b\r\n" % (len(LINES), LINES)

# Replies to one path: what is sent first, and what is then repeated for ever.
ENDLESS: dict[str, tuple[str, bytes, bytes]] = {
    "endless_health": ("/health", HEAD, b"10000\r\n%b\r\n" % BLOCK),
    "endless_small_chunks": ("/health", HEAD, b"2\r\nxx\r\n" * 8192),
    "endless_head": ("/health", b"HTTP/1.1 200 OK\r\nX-Long: ", BLOCK),
    "endless_headers": ("/health", b"HTTP/1.1 200 OK\r\n", b"X-More: 1\r\n" * 4096),
    "endless_extension": ("/health", HEAD + b"1;", BLOCK),
    "endless_trailer": ("/health", HEAD + b"2\r\n{}\r\n0\r\nX-Long: ", BLOCK),
    "endless_state": ("/microserving/state", HEAD, b"10000\r\n%b\r\n" % BLOCK),
    "endless_model": ("/microserving/model", HEAD, b"10000\r\n%b\r\n" % BLOCK),
    "endless_prefixes": ("/microserving/prefixes", HEAD, b"10000\r\n%b\r\n" % BLOCK),
    "endless_changes": ("/microserving/prefixes", HEAD, CHANGES),
    "endless_error": (
        "/microserving/start_generate",
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"10000\r\n%b\r\n" % BLOCK,
    ),
}
# What comes on the token stream once a generation has been accepted; ID is the request's.
FRAMES: dict[str, bytes] = {
    "negative_token": b'{"ID": {"token_ids": [-1], "text": "x"}}\n',
    "text_token": b'{"ID": {"token_ids": ["1"], "text": "x"}}\n',
    "unknown_token": b'{"ID": {"token_ids": [999999], "text": "x"}}\n',
    "huge_token": b'{"ID": {"token_ids": [%d], "text": "x"}}\n' % 10**40,
    "deep_frame": b'{"ID": {"error": {"message": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}}\n",
    "no_json": b"\xff\xfe{{{\n",
    "no_object": b"[1, 2, 3]\n",
    "negative_usage": (
        b'{"ID": {"token_ids": [], "finish_reason": "stop", "usage": '
        b'{"prompt_tokens": -1, "completion_tokens": -1, "cached_tokens": -1}}}\n'
    ),
    "strange_error": b'{"ID": {"error": {"type": ["x"], "message": {}, "param": 5, "code": []}}}\n',
    "odd_logprobs": b'{"ID": {"token_ids": [1], "logprobs": [{"a": 1}]}}\n',
}
# What comes on it without end.
FLOODS: dict[str, bytes] = {
    "endless_line": BLOCK,
    "endless_newlines": b"\n" * len(BLOCK),
    "strangers": b'{"nobody": {"token_ids": [5], "text": "x"}}\n' * 1024,
    "huge_text": b'{"ID": {"token_ids": [], "text": "%b"}}\n' % (b"x" * (4 << 20)),
}
# Replies to start_generate.
REPLIES: dict[str, bytes] = {
    "deep_error": b'{"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "junk_error": b"\x00" * 1000,
}
RETRY_AFTER = {
    "retry_nan": "nan", "retry_inf": "inf", "retry_negative": "-5", "retry_huge": "9" * 400,
    "retry_date": "Wed, 21 Oct 2065 07:28:00 GMT", "retry_zero": "0", "retry_junk": "\x7f",
}  # fmt: skip
OTHERS = (
    "silent",  # accepts a generation and says nothing
    "silent_call",  # never answers start_generate
    "dribble",  # sends a frame byte by byte, without end
    "runs_on",  # goes on beyond max_tokens
    "unasked",  # sends a second reply to each call
    "absurd_state",  # numbers that are no counts, an id with a line feed
    "broken_tokenizer",
    "wrong_lease",  # a lease that matches more than was asked for
    "negative_send",  # a send of fewer than no bytes
)
LIES = (*ENDLESS, *FRAMES, *FLOODS, *REPLIES, *RETRY_AFTER, *OTHERS)
SILENT = tuple(lie for lie in LIES if lie not in ("runs_on", "huge_text"))


def default_model() -> dict[str, Any]:
    """Return a model without a usable tokenizer: give that of a real engine."""
    return {
        "name": "lies", "context_length": 4096, "vocab_size": 1000, "eos_token_ids": [0],
        "bos_token": None, "eos_token": None, "tokenizer_json": "{}", "chat_template": None,
        "fingerprint": "lies", "page_size": 16, "kv_bytes_per_token": 4,
    }  # fmt: skip


class LyingEngine:
    """One engine that tells `lie`. `calls` lists the calls that it got; `url` is set in `serving`.

    `token_at` returns the token that it emits at a position of prompt and output.
    """

    def __init__(
        self,
        lie: str,
        *,
        model: dict[str, Any] | None = None,
        id: str = "liar",
        token_at: Callable[[int], int] = lambda position: 100 + position,
    ) -> None:
        if lie not in LIES:
            raise ValueError(f"no lie {lie!r}; there are {', '.join(LIES)}")
        self.lie = lie
        self.id = id
        self.url = ""
        self.calls: list[str] = []
        self._model = model or default_model()
        self._token_at = token_at
        self._streams: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[LyingEngine]:
        """Listen while the body runs."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, limit=64 << 20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    target = head.split(" ", 2)[1]
                    size = next(
                        (int(line.split(":")[1]) for line in head.split("\r\n")
                         if line.lower().startswith("content-length:")), 0,
                    )  # fmt: skip
                    body = json.loads(await reader.readexactly(size)) if size else {}
                    path, _, query = target.partition("?")
                    self.calls.append(path.removeprefix("/microserving/"))
                    await self._answer(path, query, body, writer)
        finally:
            self._tasks.discard(task)
            for id, stream in list(self._streams.items()):
                if stream is writer:
                    del self._streams[id]
            writer.transport.abort()

    async def _answer(
        self, path: str, query: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        call = path.removeprefix("/microserving/")
        if self.lie in ENDLESS and ENDLESS[self.lie][0] == path:
            _, first, again = ENDLESS[self.lie]
            writer.write(first)
            await self._repeat(again, writer)
        elif call == "stream":
            self._streams[query.removeprefix("id=")] = writer
            writer.write(HEAD + chunk(b"\n"))
            await asyncio.Event().wait()
        elif call == "prefixes":
            writer.write(HEAD + chunk(b'{"added": [], "removed": []}\n'))
            await asyncio.Event().wait()
        elif call == "start_generate":
            await self._start(body, writer)
        else:
            self._reply(writer, self._fields(call, body))
        await writer.drain()

    def _fields(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        if call == "model":
            broken = {"tokenizer_json": '{"model": 3}', "fingerprint": "broken"}
            return {**self._model, **(broken if self.lie == "broken_tokenizer" else {})}
        if call == "state":
            names = ("total", "free", "cached", "leased", "active", "quarantined", "pinned")
            state = {
                "engine_id": self.id, "epoch": 1, "role": "any", "model": self._model["name"],
                "page_size": self._model["page_size"], "pages": dict.fromkeys(names, 0),
                "running": 0, "waiting": 0, "leases": [], "puts_in_flight": 0, "prefix_tokens": 0,
            }  # fmt: skip
            if self.lie == "absurd_state":
                state |= {"engine_id": "a\nb", "running": 10**30, "waiting": -1}
            return state
        if call == "prep_recv":
            match_len = body["end"] + 16 if self.lie == "wrong_lease" else 0
            lease = {"lease_id": "lie", "kv_addr": "lie", "expires_ms": 1000}
            return {**lease, "match_len": match_len, "end": body["end"]}
        if call == "remote_send":
            sent = body["end"] - body["begin"]
            size = -1 if self.lie == "negative_send" else 4 * sent
            return {
                "sent_tokens": sent, "cached_tokens": 0, "computed_tokens": sent, "bytes": size,
                "ms": 1.0,
            }  # fmt: skip
        return {}

    def _reply(
        self,
        writer: asyncio.StreamWriter,
        fields: dict[str, Any] | bytes,
        status: str = "200 OK",
        *headers: str,
    ) -> None:
        data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers, "", ""]
        reply = "\r\n".join(lines).encode("latin-1") + data
        writer.write(reply * (2 if self.lie == "unasked" else 1))

    async def _start(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        name, lie = body["request_id"], self.lie
        if lie == "silent_call":
            await asyncio.Event().wait()
        if lie in REPLIES:
            self._reply(writer, REPLIES[lie], "500 No")
            return
        if lie in RETRY_AFTER:
            full = {"error": {"type": "no_capacity", "message": "full"}}
            self._reply(writer, full, "429 Full", f"Retry-After: {RETRY_AFTER[lie]}")
            return
        self._reply(writer, {"request_id": name})
        await writer.drain()
        stream = self._streams.get(body.get("stream_id", ""))
        if stream is None:
            return
        if lie in FRAMES:
            stream.write(chunk(FRAMES[lie].replace(b"ID", name.encode())))
            await stream.drain()
        elif lie in FLOODS:
            flood = chunk(FLOODS[lie].replace(b"ID", name.encode()))
            self._spawn(self._repeat(flood, stream))
        elif lie == "dribble":
            self._spawn(self._repeat(chunk(b" "), stream, every_s=0.01))
        elif lie == "runs_on":
            self._spawn(self._run_on(name, body, stream))

    async def _run_on(self, name: str, body: dict[str, Any], stream: asyncio.StreamWriter) -> None:
        position = len(body["prompt"]) + len(body.get("output", ()))
        with suppress(ConnectionError):
            while not stream.is_closing():
                event = {"token_ids": [self._token_at(position)], "text": "x", "begin": 0}
                stream.write(chunk(json.dumps({name: event}).encode() + b"\n"))
                await stream.drain()
                await asyncio.sleep(0.001)
                position += 1

    async def _repeat(
        self, data: bytes, writer: asyncio.StreamWriter, every_s: float = 0.0
    ) -> None:
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(every_s)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lie", choices=LIES, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engine-id", default="liar")
    parser.add_argument("--like", help="URL of a real engine, whose model it claims to have")
    parser.add_argument("--like-key", default="", help="that engine's key")
    options = parser.parse_args()
    model = None
    if options.like:
        headers = {"Authorization": f"Bearer {options.like_key}"} if options.like_key else {}
        ask = urllib.request.Request(f"{options.like}/microserving/model", headers=headers)
        with urllib.request.urlopen(ask) as reply:
            model = json.load(reply)
    asyncio.run(serve(LyingEngine(options.lie, model=model, id=options.engine_id), options.port))


async def serve(engine: LyingEngine, port: int) -> None:
    async with engine.serving(port):
        print(f"engine {engine.id} ready {engine.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
