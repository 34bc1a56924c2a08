"""NVIDIA's AIPerf, unmodified, against the router: does an independent client work with it?

Purpose: load tools use an OpenAI-style API most strictly. AIPerf measures streams of chat and of
completions, counts tokens by itself and by the server's `usage`, and reports errors.

How: `microserve up tiny` with two engines; AIPerf in an environment of its own (`make peers`), with
the model's tokenizer, `REQUESTS` requests of each kind, `CONCURRENCY` at a time. AIPerf's own
figures are shown. The run passes if each request succeeded with the number of tokens requested.
With `--backend vllm` the engines are vLLM's, under `prefill_decode`.

Run: `make bench-aiperf`, or `python -m bench.aiperf [--backend vllm] [--save]`; exits 1 if a
request failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.peer_vllm import PYTHON
from bench.report import publish, table

REQUESTS, CONCURRENCY, PROMPT_TOKENS, TOKENS = 100, 8, 64, 16
AIPERF = Path(__file__).parent.parent / ".peers" / "aiperf" / "bin" / "aiperf"
START_S = 120.0
VLLM = ("--backend", "vllm", "--prefill", "1", "--decode", "1", "--strategy", "prefill_decode",
        "--pool-pages", "512", "--vllm-args=--enforce-eager --block-size 32")  # fmt: skip


@contextmanager
def deployment(folder: Path, *, vllm: bool = False) -> Iterator[dict[str, Any]]:
    """Start two engines and a router, and yield the contents of the state file."""
    state = folder / "state.json"
    python, kind = (str(PYTHON), VLLM) if vllm else (sys.executable, ("--engines", "2"))
    command = [python, "-m", "router", "up", "tiny", *kind, "--port", "0"]
    with subprocess.Popen(
        [*command, "--state-file", str(state)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            give_up = time.monotonic() + START_S
            while not state.exists():
                if process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError("microserve up did not get ready")
                time.sleep(0.1)
            yield json.loads(state.read_text())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def save_tokenizer(engine: str, key: str, folder: Path) -> None:
    """Write what transformers needs to load the model's tokenizer from `folder`."""
    headers = {"Authorization": f"Bearer {key}"}
    model = httpx.get(f"{engine}/microserving/model", headers=headers).json()
    folder.mkdir()
    (folder / "tokenizer.json").write_text(model["tokenizer_json"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model["eos_token"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def profile(router: str, kind: str, folder: Path) -> dict[str, Any]:
    """Run AIPerf on one endpoint and return the document it writes."""
    out = folder / kind
    subprocess.run(
        [
            *(str(AIPERF), "profile", "--model", "tiny", "--url", router),
            *("--endpoint-type", kind, "--streaming", "--tokenizer", str(folder / "tokenizer")),
            *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
            *("--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"),
            *("--request-count", str(REQUESTS), "--concurrency", str(CONCURRENCY)),
            *("--use-server-token-count", "--ui", "none", "--output-artifact-dir", str(out)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    document: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    return document


def figures(document: dict[str, Any]) -> dict[str, float]:
    """Select the main figures from AIPerf's document."""
    errors = sum(error["count"] for error in document.get("error_summary") or [])
    return {
        "succeeded": document["request_count"]["avg"],
        "failed": errors,
        "tokens": document["output_sequence_length"]["avg"],
        "ttft_ms_p50": document["time_to_first_token"]["p50"],
        "itl_ms_p50": document["inter_token_latency"]["p50"],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--backend", choices=["microserve", "vllm"], default="microserve")
    options.add_argument("--save", action="store_true", help="keep the figures in bench/results")
    vllm = options.parse_args().backend == "vllm"
    if not AIPERF.exists():
        print("AIPerf is not set up: make peers", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, deployment(Path(name), vllm=vllm) as state:
        url, key = state["engines"][0]["url"], state["engine_api_key"]
        save_tokenizer(url, key, Path(name) / "tokenizer")
        kinds = {
            kind: figures(profile(state["router"]["url"], kind, Path(name)))
            for kind in ("chat", "completions")
        }
    columns = list(kinds["chat"])
    rows = [[kind, *(f"{row[column]:.1f}" for column in columns)] for kind, row in kinds.items()]
    table(f"AIPerf, {REQUESTS} requests of {TOKENS} tokens", ["endpoint", *columns], rows)
    publish("aiperf", kinds, *(["--backend vllm"] if vllm else []))
    good = {"succeeded": REQUESTS, "failed": 0, "tokens": TOKENS}
    return int(any({key: row[key] for key in good} != good for row in kinds.values()))


if __name__ == "__main__":
    sys.exit(main())
