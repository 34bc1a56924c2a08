"""Engines that differ, the `nixl` transport, compiled models, and flags that cannot work."""

from __future__ import annotations

import os
import subprocess

import pytest
from vllm_engines import (
    EAGER,
    PYTHON,
    VllmProcess,
    compiles,
    prompt,
    pytestmark,
    running,
    send,
    tokens,
    unique,
)

__all__ = ["pytestmark"]


def test_engines_whose_blocks_differ_are_told_apart_before_a_byte_moves():
    others = {
        "block size": VllmProcess(cpu="1", vllm=("--", "--enforce-eager", "--block-size", "64")),
        "secret": VllmProcess(cpu="1", secret="another"),
    }
    with running(VllmProcess(cpu="0"), *others.values()) as (sender, *_):
        for name, receiver in others.items():
            ids = prompt(100, 1)
            lease = receiver.post("prep_recv", request_id=unique(), prompt=ids, end=99).json()
            refused = sender.post(
                "remote_send",
                request_id=unique(),
                prompt=ids,
                begin=0,
                end=99,
                kv_addr=lease["kv_addr"],
            )
            assert refused.status_code == 401, name
            assert refused.json()["error"]["type"] == "bad_address", name
            receiver.post("release", lease_id=lease["lease_id"])
            receiver.at_rest()
        fingerprints = {
            engine.http.get("/microserving/model").json()["fingerprint"]
            for engine in (sender, others["block size"], others["secret"])
        }
        assert len(fingerprints) == 2


def test_kv_moves_between_two_addresses_over_nixl():
    flags = ("--transport", "nixl", "--host")
    first = VllmProcess(*flags, "127.0.0.1", cpu="0")
    second = VllmProcess(*flags, "127.0.0.2", cpu="1")
    with running(first, second) as (sender, receiver):
        for end in (33, 64, 99):
            ids = prompt(100, end)
            request_id, lease_id, sent = send(sender, receiver, ids, end)
            assert sent["computed_tokens"] == end
            got = receiver.generate(ids, begin=end, lease_id=lease_id, request_id=request_id)
            assert tokens(got) == sender.tokens(ids)
        sender.at_rest()
        receiver.at_rest()


@compiles
def test_a_compiled_sender_and_chunks_of_its_prompt():
    """Without --enforce-eager, layers are put from within a compiled graph."""
    compiled = ("--", "--block-size", "32", "--max-num-batched-tokens", "128")
    with running(VllmProcess(cpu="0", vllm=compiled), VllmProcess(cpu="1")) as engines:
        sender, receiver = engines
        for end in (100, 301, 512, 599):
            ids = prompt(600, end)
            request_id, lease_id, sent = send(sender, receiver, ids, end)
            assert sent["computed_tokens"] == end
            got = receiver.generate(ids, begin=end, lease_id=lease_id, request_id=request_id)
            assert tokens(got) == receiver.tokens(ids)
            assert tokens(got) == sender.tokens(ids)
        for engine in engines:
            engine.at_rest()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--", "--tensor-parallel-size", "2"), "engines of one worker only"),
        (("--", "--no-such-flag"), "vLLM does not take its flags: unrecognized arguments"),
        (("--", "--block-size", "16"), "--block-size 16: its attention on CPUs wants a multiple"),
        (("--", "--no-enable-prefix-caching"), "prefix caching is off"),
        (("--", "--kv-transfer-config", "{}"), "the connector is this engine's own"),
        (("--host-pages", "5"), "--host-pages has no meaning with --backend vllm"),
        (("--max-model-len", "999999"), "vLLM does not take these settings"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(flags: tuple[str, ...], said: str):
    done = subprocess.run(
        [str(PYTHON), "-P", "-m", "engine", "tiny", "--backend", "vllm", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in done.stderr
    # No complaints of libraries follow.
    assert done.stderr.rstrip().endswith(errors[0])


def test_vllm_s_flags_need_its_backend():
    done = subprocess.run(
        [str(PYTHON), "-P", "-m", "engine", "tiny", *EAGER],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "need --backend vllm" in done.stderr
