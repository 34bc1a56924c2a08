"""The files of the page: who gets them, with which headers, and that they fit together."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from router.ui import assets

HTML = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}  # as browsers send it
MOST_BYTES = 200_000


async def test_browsers_get_the_page_and_others_what_they_got_before(route, fake):
    async with route(fake("a"), api_key="k") as r:
        async with r.http.get(r.server.url + "/", headers=HTML) as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and "form-action 'none'" in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"
            assert response.headers["Vary"] == "Accept"
            page = await response.text()
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            async with r.http.get(f"{r.server.url}/{path}") as response:
                assert response.status == 200, path
                assert response.headers["Content-Security-Policy"] == policy
        for accept in (
            "*/*",
            "application/json",
            "application/json,text/html;q=0.5",
            "text/html;q=0",
        ):
            async with r.http.get(r.server.url + "/", headers={"Accept": accept}) as response:
                assert response.status == 401, accept  # as any path that needs a key
        async with r.http.get(
            r.server.url + "/", headers={"Authorization": "Bearer k", "Accept": "*/*"}
        ) as response:
            assert response.status == 404
        for unknown in ("ui/absent.js", "ui/", "ui/../router/ui.py", "ui/vendor/LICENSE.htm"):
            async with r.http.get(f"{r.server.url}/{unknown}", headers=HTML) as response:
                assert response.status in (401, 404), unknown
        async with r.http.post(r.server.url + "/ui/app.js") as response:
            assert response.status in (404, 405)


async def test_files_that_have_not_changed_are_not_sent_again(route, fake):
    async with route(fake("a")) as r:
        url = r.server.url + "/ui/app.js"
        async with r.http.get(url) as response:
            tag, body = response.headers["ETag"], await response.read()
        assert body == assets()["app.js"].body
        for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
            async with r.http.get(url, headers={"If-None-Match": known}) as response:
                assert (response.status, await response.read()) == (304, b""), known
        async with r.http.get(url, headers={"If-None-Match": '"other"'}) as response:
            assert (response.status, await response.read()) == (200, body)
        async with r.http.head(url) as response:
            assert (response.status, response.headers["ETag"]) == (200, tag)
            assert await response.read() == b""
        async with r.http.get(r.server.url + "/metrics") as response:
            assert 'path="/ui/",status="304"' in await response.text()


async def test_no_ui_serves_no_page(route, fake):
    async with route(fake("a"), no_ui=True) as r:
        for path in ("/", "/ui/app.js"):
            async with r.http.get(r.server.url + path, headers=HTML) as response:
                assert response.status == 404


def test_all_files_together_are_small_and_have_known_types():
    files = assets()
    assert sum(len(asset.body) for asset in files.values()) < MOST_BYTES
    assert {PurePosixPath(name).suffix for name in files} == {".css", ".html", ".js", ".svg"}
    assert len({asset.etag for asset in files.values()}) == len(files)


@pytest.mark.parametrize("name", sorted(name for name in assets() if name.endswith(".js")))
def test_modules_import_files_that_are_there(name: str):
    source = assets()[name].body.decode()
    folder = PurePosixPath(name).parent
    for wanted in re.findall(r'\bfrom\s*"([^"]+)"', source):
        assert wanted.startswith("."), wanted
        parts: list[str] = []
        for part in (folder / wanted).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        assert "/".join(parts) in assets(), wanted


def test_the_page_has_no_inline_script_or_style_and_never_parses_markup():
    for name, asset in assets().items():
        if name.startswith("vendor/"):
            continue
        text = asset.body.decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
        assert "dangerouslySetInnerHTML" not in text, name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", text)
            assert not re.search(r'(?:src|href)="(?:https?:|/)', text)
