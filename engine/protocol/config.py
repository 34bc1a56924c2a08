"""The engine's flags, for `python -m engine`, `microserve engine` and `microserve up`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from engine.protocol.flags import count, flag, seconds, secret

__all__ = ["EngineConfig"]

SERVER, MODEL, POOL, TIERS = "Server", "Model", "KV pool", "Tiers"
SCHEDULING, CLUSTER, KEYS, TLS, MOCK = "Scheduling", "Cluster", "Keys", "TLS", "Mock model"
VLLM = "vLLM"
FEWEST_PORTS = 8


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. `model` is an alias, a folder, a .gguf file or a hub id."""

    model: str = "smollm2"
    host: str = flag("127.0.0.1", SERVER, "address to listen on")
    port: int = count(8100, SERVER, "port to listen on; 0 picks a free one", most=65535)
    role: Literal["any", "prefill", "decode"] = flag(
        "any", CLUSTER, "role in the cluster, a hint to strategies"
    )
    device: Literal["cpu", "cuda"] = flag("cpu", MODEL, "device that runs the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto",
        MODEL,
        "dtype of weights and KV; auto: bfloat16 if the device multiplies it, else float32, which "
        "gives the same tokens under every strategy",
    )
    quantization: Literal["none", "int8"] = flag(
        "none",
        MODEL,
        "weights of matrix products; int8: half of bfloat16's memory, faster for few decodes; "
        "needs a CPU and bfloat16",
    )
    tp: int = count(
        1,
        MODEL,
        "worker processes that share each layer (tensor parallel), at most one per KV head",
        least=1,
        most=64,
    )
    pp: int = count(
        1, MODEL, "stages of workers, each with some of the layers (pipeline)", least=1, most=64
    )
    device_pages: int = count(
        0,
        POOL,
        "pages of each worker's own memory; the pages of a step are then copied there from the "
        "pool, which may be larger, and new tokens back (swapping); 0: workers compute in the pool",
        rare=True,
    )
    max_model_len: int = count(
        0,
        MODEL,
        "longest context, prompt and output (tokens); 0: the model's, if the pool holds it",
    )
    threads: int = count(0, SERVER, "compute threads; 0: one per usable core", most=4096)
    cpus: str = flag("", SERVER, "cores to run on, such as 0,1 or 0-3; empty: all", rare=True)
    transport: Literal["auto", "shm", "nixl", "cuda_ipc"] = flag(
        "auto",
        CLUSTER,
        "way of KV to other engines; shm: within a host; nixl: also between hosts (extra nixl); "
        "cuda_ipc: between pools in GPU memory within a host (extra cuda); auto: shm within this "
        "host, and nixl beyond it unless --host is loopback; with --device cuda, cuda_ipc",
        rare=True,
    )
    kv_host: str = flag(
        "",
        CLUSTER,
        "address at which engines on other hosts put KV; empty: that of --advertise, or --host",
        rare=True,
    )
    kv_ports: str = flag(
        "", CLUSTER, "ports for KV from other hosts, such as 9000-9063; empty: any", rare=True
    )
    kv_interface: str = flag(
        "",
        CLUSTER,
        "network for KV between hosts, such as eth0 or mlx5_0:1; empty: all that UCX finds",
        rare=True,
    )
    verify_puts: Literal["off", "sampled", "always"] = flag(
        "sampled",
        CLUSTER,
        "bytes of puts to other hosts that are read back and compared: none, up to 16 KiB of each "
        "copy, or all",
        rare=True,
    )
    pool_pages: int = count(0, POOL, "pages of the KV pool; 0: chosen from model and memory")
    memory_share: float = flag(
        1.0,
        POOL,
        "share of the memory for pools that this engine takes, without --pool-pages",
        least=1e-6,
        most=1,
        rare=True,
    )
    page_size: int = count(16, POOL, "tokens per page", least=1, most=2**20, rare=True)
    host_pages: int = count(0, TIERS, "pages of host memory for prefixes and preempted requests")
    disk_pages: int = count(0, TIERS, "pages of disk for the same; needs --disk-dir")
    disk_dir: str = flag(
        "",
        TIERS,
        "folder for the disk tier, in a file that is unlinked unless --disk-keep",
        path=True,
    )
    disk_keep: bool = flag(
        False, TIERS, "name the file after the engine id, and reuse it after a restart", rare=True
    )
    preemption: Literal["swap", "recompute"] = flag(
        "swap",
        SCHEDULING,
        "what happens to the KV of a preempted request; swap: it moves to a tier that has room",
        rare=True,
    )
    max_batch: int = count(256, SCHEDULING, "most sequences decoded in one step", least=1)
    max_waiting: int = count(
        1024,
        SCHEDULING,
        "most waiting requests; further ones fail with no_capacity",
        least=1,
        rare=True,
    )
    token_budget: int = count(
        512, SCHEDULING, "most tokens run through the model in one step", least=1
    )
    decode_slowdown: float = flag(
        1.5,
        SCHEDULING,
        "factor by which prompts may lengthen a step with decodes; 0: no limit",
        least=0,
        most=1e6,
        rare=True,
    )
    lease_ms: int = count(
        30_000,
        POOL,
        "lifetime of a receive lease without a write, and of a loan without a renewal (ms)",
        least=1,
        most=3_600_000,
        rare=True,
    )
    lend_share: float = flag(
        0.0,
        POOL,
        "largest share of its pages that this engine lends to other engines",
        least=0,
        most=1,
    )
    lend_compute: float = flag(
        0.1,
        POOL,
        "largest share of one core's time that goes into attention over lent pages, for debtors, "
        "while this engine has requests of its own",
        least=0.01,
        most=1,
        rare=True,
    )
    borrow: bool = flag(
        False,
        POOL,
        "borrow pages of engines with --lend-share, which a router names; --max-model-len may then "
        "exceed the pool",
    )
    max_body_mb: int = count(
        16, SERVER, "largest request body (MiB)", least=1, most=4096, rare=True
    )
    max_bodies_mb: int = count(
        128,
        SERVER,
        "unparsed bodies of all requests together (MiB); further ones get a 503",
        least=1,
        rare=True,
    )
    max_connections: int = count(
        0,
        SERVER,
        "most open connections; further ones are refused; 0: 16384, or what the limit of open "
        "files allows",
        most=10**6,
        rare=True,
    )
    backend: Literal["microserve", "vllm"] = flag(
        "microserve", VLLM, "what computes; vllm: vLLM (extra vllm), behind the same calls"
    )
    vllm_args: str = flag(
        "", VLLM, "vLLM's own flags, as one shell-quoted text; also what follows a lone --"
    )
    step_ms: float = flag(20.0, MOCK, "duration of a step (ms)", least=0, most=1e7, rare=True)
    prefill_tokens_per_ms: float = flag(
        50.0,
        MOCK,
        "prompt tokens computed per ms; 0: prompts take no time",
        least=0,
        most=1e9,
        rare=True,
    )
    router: str = flag("", CLUSTER, "URL of a router to register with")
    router_ca: str = flag(
        "", TLS, "CA certificates (PEM) for an https router and https peers", rare=True, path=True
    )
    admin_key: str = secret(KEYS, "key of the admin API of --router")
    advertise: str = flag(
        "",
        CLUSTER,
        "URL at which routers and engines reach this engine; empty: host:port",
        rare=True,
    )
    labels: str = flag("", CLUSTER, "labels shown by the router's admin API, such as zone=a,rack=7")
    engine_id: str = flag("", CLUSTER, "name in the fleet; empty: host:port")
    api_key: str = secret(KEYS, "key that callers must send; required unless --host is loopback")
    allowed_hosts: str = flag(
        "",
        KEYS,
        "names by which callers may call this engine, besides localhost and addresses, with "
        "commas; *: any; empty: --host and that of --advertise; checked without an API key",
        rare=True,
    )
    tls_cert: str = flag("", TLS, "certificate chain (PEM); with --tls-key: serve https", path=True)
    tls_key: str = flag("", TLS, "private key of --tls-cert (PEM)", path=True)
    client_ca: str = flag(
        "",
        TLS,
        "CA certificates (PEM) of callers; those without a certificate are refused (mutual TLS)",
        rare=True,
        path=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "warning", SERVER, "lowest level of logged messages"
    )
    drain_s: float = seconds(
        0.0,
        SERVER,
        "time after SIGTERM in which what runs here may end, or move to other engines (s); a "
        "second signal ends it",
        least=0,
    )
    parent_pid: int = count(
        0,
        SERVER,
        "process id of a parent; the engine is killed when it ends; 0: none",
        most=2**31 - 1,
        rare=True,
    )

    @property
    def has_workers(self) -> bool:
        """Whether worker processes compute, instead of the engine's own."""
        return self.tp * self.pp > 1 or self.device_pages > 0

    @property
    def kv_address(self) -> str:
        """The address at which engines on other hosts put KV; empty if none is known."""
        host = self.kv_host or urlsplit(self.advertise).hostname or self.host
        return "" if host in ("0.0.0.0", "::") else host  # noqa: S104

    @property
    def kv_port_range(self) -> range:
        """The ports for KV from other hosts, port 0 for any. Raises `ValueError`."""
        if not self.kv_ports:
            return range(1)
        first, dash, last = self.kv_ports.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"--kv-ports {self.kv_ports}: expected ports as in 9000-9063")
        ports = range(int(first), int(last or first) + 1)
        if not ports or not 0 < ports[0] <= ports[-1] < 2**16:
            raise ValueError(f"--kv-ports {self.kv_ports}: ports are from 1 to 65535, upwards")
        if len(ports) < FEWEST_PORTS:  # UCX waits for a free one without an end
            raise ValueError(
                f"--kv-ports {self.kv_ports}: at least {FEWEST_PORTS} are needed, two for each "
                "engine that KV is exchanged with"
            )
        return ports

    @property
    def url(self) -> str:
        """The URL for routers and other engines, once `port` is known."""
        if self.advertise:
            return self.advertise.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"
