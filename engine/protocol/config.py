"""The flags of an engine, once, for `python -m engine`, `microserve engine` and `microserve up`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["EngineConfig"]


def flag(default: Any, help: str) -> Any:
    """A field that is also a command-line flag, `--its-name`, with `help`."""
    return field(default=default, metadata={"help": help})


def secret(help: str) -> Any:
    """A flag that nothing may show. Its environment twin is read by the engine itself."""
    return field(default="", repr=False, metadata={"help": help, "secret": True})


@dataclass(frozen=True)
class EngineConfig:
    """One engine, as started. `model` is an alias, a folder, a .gguf file or a hub id."""

    model: str = "smollm2"
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8100, "port to listen on; 0 takes a free one")
    role: Literal["any", "prefill", "decode"] = flag("any", "a hint to strategies")
    device: Literal["cpu", "cuda"] = flag("cpu", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto",
        "of weights and KV; auto: bfloat16 where the device multiplies it, else float32, in which "
        "tokens do not depend on the strategy by a bit",
    )
    quantization: Literal["none", "int8"] = flag(
        "none",
        "of the weights that are multiplied with; int8: one byte each, half the memory, and faster "
        "where few sequences decode; on a CPU, in bfloat16",
    )
    threads: int = flag(0, "compute threads; 0: one per usable core")
    cpus: str = flag("", "cores to run on, as in 0,1 or 0-3; empty: any")
    transport: Literal["shm", "nixl"] = flag(
        "shm", "how KV travels: shm within a host; nixl also between hosts (extra nixl)"
    )
    pool_pages: int = flag(0, "pages of the KV pool; 0: chosen from the model and free memory")
    page_size: int = flag(16, "tokens per page")
    host_pages: int = flag(0, "pages of host memory for prefixes and requests that lost their room")
    disk_pages: int = flag(0, "pages of disk space for the same, below that; needs --disk-dir")
    disk_dir: str = flag("", "folder for them, in a file without a name")
    disk_keep: bool = flag(
        False, "name that file after the engine's id, and find it again when the engine has died"
    )
    preemption: Literal["swap", "recompute"] = flag(
        "swap", "what becomes of a request that loses its room; without such pages: recompute"
    )
    max_batch: int = flag(256, "sequences decoded in one step, at most")
    max_waiting: int = flag(1024, "requests waiting for their turn, at most; then no_capacity")
    token_budget: int = flag(512, "tokens run through the model in one step, at most")
    decode_slowdown: float = flag(
        1.5, "how much longer prompts may make a step with decodes, about; 0: as the budget allows"
    )
    lease_ms: int = flag(30_000, "how long a receive lease lives while nobody writes (ms)")
    max_body_mb: int = flag(16, "largest request body (MiB)")
    step_ms: float = flag(20.0, "of the model mock: how long a step takes (ms)")
    prefill_tokens_per_ms: float = flag(
        50.0, "of the model mock: prompt tokens that it computes in 1 ms; 0: no time at all"
    )
    router: str = flag("", "URL of a router to register with")
    router_ca: str = flag("", "certificates (PEM) that an https router's is signed by")
    admin_key: str = secret("key of that router's admin API")
    advertise: str = flag("", "URL that routers and engines reach this one by; empty: host:port")
    labels: str = flag("", "what the router's admin API shows of it, as in zone=a,rack=7")
    engine_id: str = flag("", "name in the fleet; empty: host:port")
    api_key: str = secret("key that callers must send; needed on any address but loopback")
    tls_cert: str = flag("", "certificate chain (PEM); with --tls-key: https")
    tls_key: str = flag("", "its key (PEM)")
    log_level: Literal["debug", "info", "warning", "error"] = flag("warning", "what to log")
    parent_pid: int = flag(0, "die when this process dies; 0: do not")

    @property
    def url(self) -> str:
        """Where routers and other engines reach it, once `port` is known."""
        if self.advertise:
            return self.advertise.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"
