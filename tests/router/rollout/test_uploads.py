"""An upload that hangs in the router does not keep the router from ending."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from router_process import RouterProcess, until

from router.base.config import RouterConfig
from router.server import run

# Loops in the router only: there, modules are imported by another thread than the main one.
HANGS = """
import pathlib, threading, time
from router import strategy

@strategy
async def mine(request, cluster):
    async for chunk in cluster.engines.least_loaded().start_generate(request):
        yield chunk

if threading.current_thread() is not threading.main_thread():
    pathlib.Path({file!r}).touch()
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass
"""


@pytest.mark.processes
@pytest.mark.slow
def test_the_router_ends_while_an_upload_loops_in_it(tmp_path):
    file = tmp_path / "begun"
    body = {"source": HANGS.format(file=str(file)), "file": "mine.py"}
    router = RouterProcess([], "data_parallel", "--allow-upload")
    try:
        with ThreadPoolExecutor(1) as client:
            upload = client.submit(router.http.post, "/admin/strategies", json=body)
            until(file.exists, 60)  # a dry run comes before
            router.signal(signal.SIGTERM)
            assert router.wait() == 0
            assert isinstance(
                upload.exception() or upload.result(), httpx.HTTPError | httpx.Response
            )
    finally:
        router.kill()


async def test_a_router_that_takes_uploads_hides_its_memory(monkeypatch):
    hidden = []
    monkeypatch.setattr("router.server.hide_memory", lambda: hidden.append(True))
    monkeypatch.setattr("router.server._tune_gc", lambda: None)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)  # noqa: ASYNC222  it ends at once
    for allowed in (False, True):  # a router whose parent has gone ends at once
        await run(RouterConfig(port=0, parent_pid=child, allow_upload=allowed))
        assert hidden == [True] * allowed
