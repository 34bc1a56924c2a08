"""`/` and `/ui/…`: the page for browsers. Its files hold no data, so they need no key."""

from __future__ import annotations

from router.api.http import Handler, HttpRequest, HttpResponse
from router.base import NotFound
from router.ui import Asset, assets

__all__ = ["PAGE", "handlers", "is_page"]

PAGE = "/ui/"
INDEX = "index.html"
HTML = "text/html"
# The page runs its own scripts, and calls its own server. It is in no frame of another page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask each time; unchanged files are answered by 304
}


def handlers() -> dict[tuple[str, str], Handler]:
    """Return the handlers by method and path."""
    files = assets()
    served: dict[tuple[str, str], Handler] = {}
    for method in ("GET", "HEAD"):
        served[method, "/"] = _index(files[INDEX])
        for name, asset in files.items():
            if name != INDEX:
                served[method, f"{PAGE}{name}"] = _file(asset)
    return served


def is_page(http: HttpRequest) -> bool:
    """Return whether a request is for one of these files, and so open to everybody."""
    if http.path == "/":
        return _prefers_html(http.headers.get("accept", ""))
    return http.path.startswith(PAGE)


def _index(asset: Asset) -> Handler:
    async def handler(http: HttpRequest) -> HttpResponse:
        if not _prefers_html(http.headers.get("accept", "")):
            raise NotFound(f"no such path: {http.path}")
        response = _answer(asset, http)
        response.headers["Vary"] = "Accept"
        return response

    return handler


def _file(asset: Asset) -> Handler:
    async def handler(http: HttpRequest) -> HttpResponse:
        http.route = PAGE  # one series for all files
        return _answer(asset, http)

    return handler


def _answer(asset: Asset, http: HttpRequest) -> HttpResponse:
    headers = {**HEADERS, "ETag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in _list(http, "if-none-match")]
    if asset.etag in known or known == ["*"]:
        return HttpResponse(b"", 304, asset.media, headers)
    return HttpResponse(asset.body, 200, asset.media, headers)


def _list(http: HttpRequest, header: str) -> list[str]:
    return http.headers.get(header, "").split(",")


def _prefers_html(accept: str) -> bool:
    """Return whether an Accept header prefers HTML to JSON. `*/*` alone prefers nothing."""
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        media, *params = (piece.strip() for piece in part.split(";"))
        weights[media] = max(weights.get(media, 0.0), _weight(params))
    html = weights.get(HTML, 0.0)
    return html > 0 and html >= weights.get("application/json", 0.0)


def _weight(params: list[str]) -> float:
    for param in params:
        name, _, value = param.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
