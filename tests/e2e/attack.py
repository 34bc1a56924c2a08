"""Attack a deployment in every way that the tests know, beside honest clients.

`make attack` starts `microserve up tiny` with an API key and uploads allowed. Honest clients send
requests all the time; each answer must have the tokens of an idle engine. Meanwhile, one after the
other:

- `floods`: bodies and heads without end or key, pipelined requests, clients that do not read;
- `pages`: calls as a web page of another site would make them;
- `liars`: engines of `lying_engine.py` join the fleet for some seconds each;
- `uploads`: strategies that loop, flood their output, leave processes behind, or read memory;
- `fields`: the calls of `fuzz_http.py`.

A defect is a failed or different honest answer, a process that grows beyond its ceiling, a process
that an upload leaves behind, a page that gets what it asked for, and pages or requests left over.
Prints the defects and, as the last line, one JSON document.

python tests/e2e/attack.py --minutes 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from e2e_deployment import Deployment, deployed
from e2e_liars import SILENT, liar
from fuzz_http import fuzz
from peak_memory import PeakMemory

MIB = 1 << 20
# Growth of a process during one attack, at most. A router may hold its budget of bodies (128 MiB),
# parsed and unparsed; a frame of an engine has up to 16 MiB, and exists twice.
CEILING_MIB = {"floods": 320, "pages": 32, "liars": 200, "uploads": 64, "fields": 600}
LEASES_S = 45.0  # a lease is given 30 s
PATIENCE = 10  # times that an honest client asks again where it is told to
ORIGIN = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
# What an uploaded module does when it is imported; MARK names the process that it leaves behind.
UPLOADS = {
    "loops": "while True: pass",
    "swallows": "while True:\n try:\n  import time; time.sleep(1)\n except BaseException: pass",
    "floods": "import os\nfor _ in range(300): os.write(2, b'y' * (1 << 20))",
    "stays": (
        "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork():\n"
        "  os.execlp('sleep', 'MARK', '600')\n os._exit(0)\ntime.sleep(0.5)"
    ),
    "allocates": "x = bytearray(8 << 30)\nx[::4096] = b'x' * len(x[::4096])",
    "forks": "import os, time\nfor _ in range(7): os.fork()\ntime.sleep(600)",  # root may have more
    "exits": "import os\nos._exit(0)",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "kills": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "recurses": "def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()",
}


class Honest:
    """Clients whose answers must not change."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        draw = random.Random(0)
        self._prompts = [
            [draw.randrange(10, 290) for _ in range(draw.choice((5, 40, 300)))] for _ in range(12)
        ]
        self._wanted = [self._ask(prompt) for prompt in self._prompts]
        self.outcomes: Counter[str] = Counter()

    def _ask(self, prompt: list[int]) -> Any:
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{self._deployment.url}/v1/completions"
        for _ in range(PATIENCE):
            reply = httpx.post(url, json=body, headers=headers, timeout=120)
            if reply.status_code != 503 or "overloaded" not in reply.text:
                break
            # Bodies of others who have the key fill the budget for a moment.
            time.sleep(float(reply.headers["retry-after"]))
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text[:200]}"
        return reply.json()["choices"][0]["token_ids"]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask, two at a time, while the body runs."""
        stop = threading.Event()

        def work(seed: int) -> None:
            draw = random.Random(seed)
            while not stop.is_set():
                index = draw.randrange(len(self._prompts))
                try:
                    got = self._ask(self._prompts[index])
                except httpx.HTTPError as error:
                    got = repr(error)
                wanted = got == self._wanted[index]
                self.outcomes["as wanted" if wanted else f"defect: {str(got)[:200]}"] += 1

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


class Attack:
    """One deployment under attack."""

    def __init__(self, deployment: Deployment, seconds: float) -> None:
        """`seconds`: of each attack, about."""
        self._deployment = deployment
        self._seconds = seconds
        self._admin = deployment.admin
        self.defects: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run all attacks; return the growth of each process during each."""
        pids = {"router": self._deployment.pid}
        pids |= {engine.id: engine.pid for engine in self._deployment.engines}
        kinds: dict[str, Callable[[], None]] = {
            "floods": self._floods, "pages": self._pages, "liars": self._liars,
            "uploads": self._uploads, "fields": self._fields,
        }  # fmt: skip
        honest = Honest(self._deployment)
        grown = {}
        for name, attack in kinds.items():
            peaks = {process: PeakMemory(pid) for process, pid in pids.items()}
            with honest.asking():
                attack()
            grown[name] = {process: peak.grown // MIB for process, peak in peaks.items()}
            print(
                f"{name}: {grown[name]} MiB, {dict(honest.outcomes)}", file=sys.stderr, flush=True
            )
            for process, mib in grown[name].items():
                if mib > CEILING_MIB[name]:
                    self.defects.append(f"{process} grew by {mib} MiB during {name}")
        self.defects += [
            f"{count} × {outcome}" for outcome, count in honest.outcomes.items()
            if outcome != "as wanted"
        ]  # fmt: skip
        self._await_leases()
        return {"grown_mib": grown, "honest": honest.outcomes["as wanted"]}

    def _await_leases(self) -> None:
        """Wait until the leases of hostile calls have expired."""
        give_up = time.monotonic() + LEASES_S
        while any(engine.state()["leases"] for engine in self._deployment.engines):
            if time.monotonic() > give_up:
                self.defects.append(f"leases are left after {LEASES_S:g} s")
                return
            time.sleep(0.5)

    # Floods

    def _floods(self) -> None:
        urls = [self._deployment.url, self._deployment.engines[0].url]
        give_up = time.monotonic() + self._seconds
        while time.monotonic() < give_up:
            for url in urls:
                for flood in FLOODS:
                    asyncio.run(flooded(url, 20, flood))

    # Pages

    def _pages(self) -> None:
        router, engine = self._deployment.url, self._deployment.engines[0].url
        calls = [
            (router, "PUT", "/admin/strategy", {"name": "prefill_decode"}),
            (router, "POST", "/admin/engines", {"url": "http://127.0.0.1:9"}),
            (router, "POST", "/admin/strategies", {"source": "1", "file": "x.py"}),
            (router, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
            (engine, "POST", "/microserving/pin", {"prompt": [1, 2, 3]}),
            (engine, "GET", "/microserving/state", None),
        ]
        for base, method, path, body in calls:
            for headers in (
                ORIGIN, {**ORIGIN, "Content-Type": "text/plain"}, {"Origin": "null"},
                {"Host": "evil.example"}, {"Origin": base.replace("127.0.0.1", "localhost")},
            ):  # fmt: skip
                reply = httpx.request(
                    method, base + path, content=json.dumps(body), headers=headers, timeout=30
                )
                if reply.status_code not in (400, 401, 403, 415):
                    self.defects.append(f"{method} {path} {headers}: {reply.status_code}")

    # Liars

    def _liars(self) -> None:
        """The token of a lie that emits one may be the answer's, so only silent ones join."""
        each = self._seconds / len(SILENT)
        for lie in SILENT:
            with liar(self._deployment, lie):
                time.sleep(each)

    # Uploads

    def _uploads(self) -> None:
        mark = f"left-{secrets.token_hex(4)}"
        for name, body in UPLOADS.items():
            source = body.replace("MARK", mark) + "\n"
            try:
                status = self._post("/admin/strategies", {"source": source, "file": f"{name}.py"})
            except httpx.HTTPError as error:
                self.defects.append(f"upload {name}: {error!r}")
                continue
            if status not in (400, 409, 422):
                self.defects.append(f"upload {name}: {status}")
            left = [one.pid for one in psutil.process_iter(["cmdline"])
                    if mark in (one.info["cmdline"] or [])]  # fmt: skip
            if left:
                self.defects.append(f"upload {name} left processes: {left}")

    # Fields

    def _fields(self) -> None:
        found = fuzz(self._deployment, self._seconds / 60, {"Authorization": f"Bearer {KEY}"})
        self.defects += found.defects

    def _post(self, path: str, body: dict[str, Any]) -> int:
        reply = httpx.post(self._deployment.url + path, json=body, headers=self._admin, timeout=90)
        return reply.status_code


def _head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(lines).encode()


KEY = secrets.token_hex(16)
BODY = 8 * MIB
FLOODS = [
    _head("/v1/completions", BODY) + b" " * (BODY - 1),
    _head("/microserving/prep_recv", BODY) + b" " * (BODY - 1),
    _head("/v1/completions", BODY, f"Authorization: Bearer {KEY}") + b" " * (BODY - 1),
    _head("/health", BODY) + b" " * (BODY - 1),
    (_head("/nowhere", MIB) + b" " * MIB) * 8,
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 15_000,
    b"GET /" + b"x" * MIB,
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50_000,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 200_000,
    b"\x16\x03\x01" + b"\x00" * MIB,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * MIB,
]


async def flooded(url: str, count: int, data: bytes) -> None:
    """Send `data` on `count` connections at once, for a second at most, and read nothing."""
    parts = urlsplit(url)

    async def one() -> None:
        with suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                async with asyncio.timeout(1):
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.2)
            finally:
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    flags = parser.parse_args()
    options = ("--engines", "2", "--pool-pages", "1024", "--threads", "1", "--allow-upload",
               "--api-key", KEY, "--engine-silence", "2")  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(Path(folder), "tiny", *options) as deployment,
    ):
        attack = Attack(deployment, 60 * flags.minutes / 5)
        figures = attack.run()
    document = {"attack_minutes": flags.minutes, **figures, "defects": attack.defects}
    print("\n".join(attack.defects) or "no defect", file=sys.stderr)
    print(json.dumps(document))
    return 1 if attack.defects else 0


if __name__ == "__main__":
    sys.exit(main())
