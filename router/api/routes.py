"""Which handler answers which path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from router.api.http import HttpRequest, HttpResponse
from router.base.errors import MethodNotAllowed, NotFound

__all__ = ["Handler", "Route", "Routes"]

# Returns its answer, or None if it has sent it itself, in parts.
Handler = Callable[[HttpRequest], Awaitable[HttpResponse | None]]


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may name its end: `/admin/engines/{id}`; there may be slashes in that."""

    method: str
    path: str
    handler: Handler


class Routes:
    """All of a router's."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._all = list(routes)
        self._plain: dict[str, dict[str, Route]] = {}
        self._named: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        named: dict[str, dict[str, Route]] = {}
        for route in self._all:
            kind = named if "{" in route.path else self._plain
            kind.setdefault(route.path, {})[route.method] = route
        for path, methods in named.items():
            pattern = re.sub(r"\\{(\w+)\\}$", r"(?P<\1>.+)", re.escape(path))
            self._named.append((re.compile(pattern, re.DOTALL), methods))

    def __iter__(self) -> Iterator[Route]:
        return iter(self._all)

    def find(self, http: HttpRequest) -> Route:
        """The route of a request, whose `params` are filled in. HEAD is GET without the body.

        Raises `NotFound`, and `MethodNotAllowed`.
        """
        methods = self._plain.get(http.path) or self._match(http)
        route = methods.get("GET" if http.method == "HEAD" else http.method)
        if route is None:
            message = f"{http.path} takes no {http.method}"
            raise MethodNotAllowed(message, allowed=sorted(methods))
        return route

    def _match(self, http: HttpRequest) -> dict[str, Route]:
        for pattern, methods in self._named:
            if found := pattern.fullmatch(http.path):
                http.params = found.groupdict()
                return methods
        raise NotFound(f"no such path: {http.path}")
