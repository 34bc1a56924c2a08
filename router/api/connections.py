"""The open connections of a server, and how they are closed."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.server import ServerState

from engine.web import BodyBudget, BoundedHttpProtocol, ConnectionLimit, LimitedHttpProtocol

__all__ = ["Connections"]

POLL_S = 0.01  # between two looks at whether all are closed


class Connections:
    """The connections of one server of `app`, by uvicorn's protocol with llhttp as its parser."""

    def __init__(
        self, app: ASGIApp, budget: BodyBudget, limit: ConnectionLimit | None = None
    ) -> None:
        """`budget`: for the bodies of all connections. `limit`: none by default."""
        self._budget = budget
        self._limit = limit or ConnectionLimit()
        self._config = Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # who may use the admin API depends on the true address
            reset_contextvars=True,  # a request must not see the context of the one before it
        )
        self._config.load()
        self._state = ServerState()

    @property
    def open(self) -> set[BoundedHttpProtocol]:
        """The open connections."""
        return self._state.connections  # type: ignore[return-value]  # all are made below

    def connection(self) -> BoundedHttpProtocol:
        """Return the protocol of a connection that was accepted."""
        return LimitedHttpProtocol(
            self._config, self._state, {}, budget=self._budget, limit=self._limit
        )

    async def close(self, bound_s: float) -> None:
        """Close all connections: idle ones at once, others when the client has read its response.

        After `bound_s` seconds, abort those that are left, which cancels their requests. Then wait
        for the tasks of all requests.
        """
        for connection in list(self.open):
            connection.shutdown()
        give_up = time.monotonic() + bound_s
        while self.open and time.monotonic() < give_up:  # noqa: ASYNC110  uvicorn has no event
            await asyncio.sleep(POLL_S)
        for connection in list(self.open):
            connection.abort()
        if tasks := set(self._state.tasks):
            await asyncio.wait(tasks)
