"""Requests to a router, without a pause, until told to stop."""

from __future__ import annotations

import threading
from typing import Self

import httpx

__all__ = ["Load"]


class Load:
    """Clients in threads of their own, each with one request after the other."""

    def __init__(self, url: str, *, clients: int = 4, tokens: int = 20) -> None:
        self._url = f"{url}/v1/completions"
        self._tokens = tokens
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self.done = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        body = {"model": "mock", "prompt": "a b c", "max_tokens": self._tokens}
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not self._stopping.is_set():
                try:
                    reply = http.post(self._url, json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                if reply.status_code == 200:
                    self.done += reply.json()["usage"]["completion_tokens"] == self._tokens
                else:
                    self.failures.append(reply.text)
