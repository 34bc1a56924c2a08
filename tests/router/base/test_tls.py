"""TLS to clients and to real engines, and keys hidden from the process list."""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme
from click.testing import CliRunner
from engine_process import EngineProcess
from forked import ForkedProcess, run_microserve
from router_process import until

from engine.protocol import BadRequest
from router.base.tls import client_context, server_context
from router.cli import cli

ASK = {"prompt": "hello", "max_tokens": 3}
FLAGS = ("--step-ms", "0", "--prefill-tokens-per-ms", "0")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Paths of an authority's certificate, a server's certificate and the server's key."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server.private_key_pem.write_to_path(folder / "key.pem")
    server.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}


def test_missing_and_wrong_files_are_refused(tmp_path, files):
    assert server_context("", "") is None
    assert client_context("") is None
    (tmp_path / "junk").write_text("junk")
    for cert, key in (
        (files["cert"], ""), ("", files["key"]), (files["key"], files["cert"]),
        (str(tmp_path / "absent"), files["key"]), (str(tmp_path / "junk"), files["key"]),
    ):  # fmt: skip
        with pytest.raises(BadRequest):
            server_context(cert, key)
    for ca in (str(tmp_path / "absent"), str(tmp_path / "junk")):
        with pytest.raises(BadRequest):
            client_context(ca)
    for cert, key in (
        (files["cert"], ""),
        ("", files["key"]),
        (str(tmp_path / "junk"), files["key"]),
    ):
        with pytest.raises(BadRequest):
            client_context(files["ca"], cert, key)


@pytest.mark.processes
@pytest.mark.slow
def test_tls_from_the_client_to_the_engine(files):
    """An engine that serves HTTPS registers itself with a router that does.

    Its callers need a certificate.
    """
    tls = ("--tls-cert", files["cert"], "--tls-key", files["key"])
    client = httpx.Client(verify=ssl.create_default_context(cafile=files["ca"]), timeout=20)
    router = ForkedProcess(
        run_microserve, "router", "--port", "0", "--engine-ca", files["ca"], *tls,
        "--engine-cert", files["cert"], "--engine-cert-key", files["key"],
        MICROSERVE_ROUTER_ADMIN_KEY="adm", MICROSERVE_ROUTER_ENGINE_API_KEY="eng",
    )  # fmt: skip
    try:
        url = router.line().split()[-1]
        assert url.startswith("https://")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")  # its authority is not trusted
        engine = EngineProcess(
            *FLAGS, "--router", url, "--router-ca", files["ca"], *tls, "--labels", "zone=a",
            "--engine-id", "secure", "--client-ca", files["ca"], model="mock",
            MICROSERVE_ENGINE_ADMIN_KEY="adm", MICROSERVE_ENGINE_API_KEY="eng",
        )  # fmt: skip
        try:
            admin = {"Authorization": "Bearer adm"}
            status = ""
            while status != "up":
                listed = client.get(f"{url}/admin/engines", headers=admin).json()["engines"]
                status = listed[0]["status"] if listed else ""
                assert status != "down", listed
            assert (listed[0]["url"], listed[0]["labels"]) == (engine.url, {"zone": "a"})
            assert engine.url.startswith("https://")
            key = {"Authorization": "Bearer eng"}
            with pytest.raises(httpx.TransportError):
                client.get(f"{engine.url}/microserving/state", headers=key)
            shown = ssl.create_default_context(cafile=files["ca"])
            shown.load_cert_chain(files["cert"], files["key"])
            with httpx.Client(verify=shown, timeout=20) as known:
                reply = known.get(f"{engine.url}/microserving/state", headers=key)
                assert reply.status_code == 200
            reply = client.post(f"{url}/v1/completions", json=ASK)
            assert reply.status_code == 200, reply.text
            assert engine.stop()[0] == 0
            # It has removed itself.
            until(lambda: client.get(f"{url}/admin/engines", headers=admin).json()["engines"] == [])
            assert client.post(f"{url}/v1/completions", json=ASK).status_code == 503
        finally:
            engine.kill()
    finally:
        router.kill()
        client.close()


@pytest.mark.processes
@pytest.mark.slow
def test_a_whole_cluster_with_tls_at_its_front(files):
    tls = ("--tls-cert", files["cert"], "--tls-key", files["key"])
    flags = ("--engines", "1", "--port", "0", "--max-body-mb", "1")
    environment = {"MICROSERVE_UP_ENGINE_API_KEY": "eng"}
    up = ForkedProcess(run_microserve, "up", "mock", *flags, *tls, **environment)
    try:
        lines = [up.line()]
        while not lines[-1].startswith("curl"):
            lines.append(up.line())
        engine, router = (line.split()[2] for line in lines[:2])
        assert engine.startswith("http://") and router.startswith("https://")
        assert '--cacert "$CA"' in lines[-1]
        trusted = ssl.create_default_context(cafile=files["ca"])
        with httpx.Client(verify=trusted, timeout=30) as client:
            reply = client.post(f"{router}/v1/completions", json=ASK)
            assert reply.status_code == 200, reply.text
            reply = client.post(f"{router}/v1/completions", content=b" " * 2**21)
            assert reply.status_code == 413  # the router's limit applies too
        check_commands(router, files["ca"])
        state = f"{engine}/microserving/state"
        assert httpx.get(state).status_code == 401
        assert httpx.get(state, headers={"Authorization": "Bearer eng"}).status_code == 200
        up.signal(signal.SIGTERM)
        assert up.wait() == 0, up.log
    finally:
        up.kill()
    wrong = ForkedProcess(run_microserve, "up", "mock", "--tls-cert", files["cert"])
    assert wrong.wait() == 2 and "--tls-key" in wrong.log


def check_commands(router: str, ca: str) -> None:
    """Check that the commands that call a router trust it with `--ca` only."""
    few = ("--requests", "1", "--input", "3", "--output", "2")
    for command in (("chat", "--max-tokens", "2", "hello"), ("strategy", "list"), ("bench", *few)):
        server = ("--url", router)
        for authority, code in ((("--ca", ca), 0), ((), 1), (("--ca", __file__), 2)):
            name, *rest = command
            done = CliRunner().invoke(cli, [name, *server, *authority, *rest])
            assert done.exit_code == code, (command, authority, done.output)


def _arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("command", [("router", "--admin-key=the-secret"), ("engine", "mock")])
def test_keys_given_as_flags_are_hidden_from_the_process_list(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *command, "--port", "0", "--api-key", "the-secret"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = process.stdout.readline().split()[-1]
        assert "the-secret" not in _arguments(process.pid)
        path = "/v1/models" if command[0] == "router" else "/microserving/state"
        assert httpx.get(url + path).status_code == 401
        reply = httpx.get(url + path, headers={"Authorization": "Bearer the-secret"})
        assert reply.status_code in (200, 503)
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
