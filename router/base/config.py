"""The router's configuration. The command line reads flags, defaults and help texts from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.protocol import flag, seconds, secret

__all__ = ["RouterConfig"]

SERVER, ENGINES, STRATEGY, LIMITS = "Server", "Engines", "Strategy", "Limits"
DEADLINES, KEYS, TLS, LOGS = "Deadlines", "Keys", "TLS", "Logs"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router process. Times are in seconds unless the name says `ms`."""

    engines: tuple[str, ...] = ()  # URLs, also with role and labels
    strategy: str = "data_parallel"  # a name, or the path of a .py file
    params: Mapping[str, Any] = field(default_factory=dict)
    host: str = flag("127.0.0.1", SERVER, "address to listen on")
    port: int = flag(8000, SERVER, "port to listen on; 0 picks a free one", least=0, most=65535)
    workers: int = flag(
        1, SERVER, "router processes on this port, which agree on what runs", least=1, most=64
    )
    store: str = secret(
        SERVER,
        "URL of the Redis or Valkey by which several routers agree: redis://HOST:PORT/DB, with "
        "#NAME for one of several fleets; empty: none",
    )
    store_password_file: str = flag(
        "",
        SERVER,
        "file with the password of --store, read at each connection; empty: that of the URL",
        rare=True,
        path=True,
    )
    served_model_name: str = flag(
        "", SERVER, "model name that clients use; empty: the name that the engines report"
    )
    tls_cert: str = flag("", TLS, "certificate chain (PEM); with --tls-key: serve https", path=True)
    tls_key: str = flag("", TLS, "private key of --tls-cert (PEM)", path=True)
    engine_ca: str = flag(
        "",
        TLS,
        "CA certificates (PEM) for https engines; empty: the system's",
        rare=True,
        path=True,
    )
    engine_cert: str = flag(
        "",
        TLS,
        "certificate chain (PEM) that the router shows to engines with --client-ca",
        rare=True,
        path=True,
    )
    engine_cert_key: str = flag("", TLS, "private key of --engine-cert (PEM)", rare=True, path=True)
    api_key: str = secret(KEYS, "key that clients must send; empty: none")
    api_key_file: str = flag(
        "",
        KEYS,
        "file of client keys, one 'KEY [name=N] [rpm=N] [tpm=N]' per line; watched",
        path=True,
    )
    requests_per_minute: int = flag(
        0,
        LIMITS,
        "requests per minute of each API key, or of all clients without keys; 0: no limit",
        least=0,
        most=10**9,
    )
    tokens_per_minute: int = flag(
        0,
        LIMITS,
        "tokens in and out per minute, counted likewise; 0: no limit",
        least=0,
        most=10**12,
    )
    admin_key: str = secret(KEYS, "key of the admin API; empty: it answers on loopback only")
    engine_api_key: str = secret(KEYS, "key that the router sends to the engines")
    openai_api_key: str = secret(KEYS, "key that the router sends to plain OpenAI servers")
    allow_upload: bool = flag(False, STRATEGY, "let the admin API load strategies from source code")
    allowed_hosts: str = flag(
        "",
        KEYS,
        "names by which clients may call this server, besides localhost and addresses, with "
        "commas; *: any; empty: --host, or any if it is all addresses; checked without an API key",
        rare=True,
    )
    no_ui: bool = flag(False, SERVER, "serve no page for browsers at /")
    max_body_mb: int = flag(16, LIMITS, "largest request body (MiB)", least=1, most=4096, rare=True)
    max_bodies_mb: int = flag(
        128,
        LIMITS,
        "unparsed bodies of all requests together (MiB); further ones get a 503",
        least=1,
        most=2**40,
        rare=True,
    )
    max_connections: int = flag(
        0,
        LIMITS,
        "most open connections of clients; further ones are refused; 0: 16384, or what the limit "
        "of open files allows",
        least=0,
        most=10**6,
        rare=True,
    )
    body_timeout_s: float = seconds(
        30.0,
        DEADLINES,
        "time that a client may take to send a request's head, or its body (s)",
        rare=True,
    )
    client_stall_s: float = seconds(
        60.0, DEADLINES, "time that a client may leave its response unread (s)", rare=True
    )
    attempts: int = flag(
        3, LIMITS, "attempts per request, the first one included", least=1, most=100
    )
    retry_share: float = flag(
        0.2,
        LIMITS,
        "share of the requests in flight that may be retries; retries after the loss of an engine "
        "do not count",
        least=0,
        most=1,
        rare=True,
    )
    max_queue: int = flag(
        1024,
        LIMITS,
        "requests that may wait for room on an engine; further ones get a 429",
        least=0,
        most=10**6,
    )
    max_pins: int = flag(
        256, LIMITS, "prefixes that the admin API may pin", least=0, most=10_000, rare=True
    )
    queue_timeout_s: float = seconds(
        60.0, DEADLINES, "time that a request waits for room on an engine (s)", least=0
    )
    engine_wait_s: float = seconds(
        0.0,
        DEADLINES,
        "time that a started request waits for an engine if none is up (s)",
        least=0,
        rare=True,
    )
    request_timeout_s: float = seconds(3600.0, DEADLINES, "total time of a request (s)")
    connect_timeout_s: float = seconds(2.0, ENGINES, "time to connect to an engine (s)", rare=True)
    health_interval_s: float = seconds(
        0.5, ENGINES, "interval between health checks (s)", rare=True
    )
    health_timeout_s: float = seconds(
        2.0,
        ENGINES,
        "time without a sign of life after which an engine counts as down (s)",
        rare=True,
    )
    engine_silence_s: float = seconds(
        60.0,
        ENGINES,
        "time that an engine may say nothing about a request; 20 times as long while it reports "
        "work (s)",
        rare=True,
    )
    forget_s: float = seconds(
        300.0,
        ENGINES,
        "time after which an engine that registered itself and is down is removed (s)",
        least=0,
        rare=True,
    )
    swap_blocks: int = flag(
        1,
        ENGINES,
        "engines that owe blocks of 128 tokens to each other in a circle bring them home if each "
        "owes so many; 0: never",
        least=0,
        most=2**16,
        rare=True,
    )
    engines_file: str = flag(
        "",
        ENGINES,
        "file of engines, one 'URL [role=ROLE] [LABEL=VALUE]…' per line; watched",
        path=True,
    )
    discover: str = flag(
        "",
        ENGINES,
        "services of Kubernetes whose ready pods are engines: k8s://NAMESPACE/SERVICE[,SERVICE]…, "
        "or k8s:///SERVICE for the pod's own namespace (extra kubernetes)",
    )
    openai_tokenizer: str = flag(
        "",
        ENGINES,
        "MODEL whose tokenizer and chat template the plain OpenAI servers have (openai+http://…); "
        "empty: those of an engine that serves a model of the same name",
    )
    openai_context: int = flag(
        0,
        ENGINES,
        "context of plain OpenAI servers that do not tell theirs (tokens); 0: the model's",
        least=0,
        most=2**31 - 1,
        rare=True,
    )
    watch_s: float = seconds(
        1.0, SERVER, "longest time until a change of a watched file is noticed (s)", rare=True
    )
    breaker_failures: int = flag(
        5,
        ENGINES,
        "consecutive failed calls that open an engine's circuit breaker",
        least=1,
        most=10**6,
        rare=True,
    )
    breaker_open_s: float = seconds(
        5.0, ENGINES, "time that a circuit breaker stays open (s)", rare=True
    )
    release_timeout_s: float = seconds(
        2.0, ENGINES, "time that releasing a lease or a stream may take (s)", rare=True
    )
    stall_s: float = seconds(
        60.0,
        STRATEGY,
        "time that a strategy may wait while no engine works for its request (s)",
        rare=True,
    )
    grace_s: float = seconds(
        3.0, STRATEGY, "time that a strategy may take to end once cancelled (s)", rare=True
    )
    block_limit_s: float = seconds(
        0.5, STRATEGY, "time that a strategy may block the event loop (s)", rare=True
    )
    block_strikes: int = flag(
        3,
        STRATEGY,
        "times that a strategy may block the event loop before it is rolled back",
        least=1,
        most=10**6,
        rare=True,
    )
    audit_log: str = flag(
        "", STRATEGY, "file to which every change of strategy is appended; empty: none", path=True
    )
    shutdown_s: float = seconds(
        2.0, SERVER, "time that requests may take to end after SIGTERM (s)", least=0
    )
    stream_interval_ms: float = flag(
        20.0,
        SERVER,
        "shortest interval between two events of a stream (ms); 0: send each token at once",
        least=0,
        most=10_000,
        rare=True,
    )
    max_receipts: int = flag(
        2048, LOGS, "number of latest request receipts to keep", least=0, most=10**7, rare=True
    )
    traffic_minutes: float = flag(
        60.0,
        LOGS,
        "time for which the shape of requests is kept, without their text (min); 0: not at all",
        least=0,
        most=10_080,
        rare=True,
    )
    traffic_mb: int = flag(
        16,
        LOGS,
        "most memory for it (MiB); older requests are dropped",
        least=1,
        most=4096,
        rare=True,
    )
    log_format: Literal["text", "json"] = flag(
        "text", LOGS, "plain text, or one JSON object per line"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "warning", LOGS, "lowest level of logged messages"
    )
    parent_pid: int = flag(
        0, SERVER, "stop when this process ends; 0: never", least=0, most=2**31 - 1, rare=True
    )
