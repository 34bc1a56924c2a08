"""The flags of the router, once: the command line reads its defaults and help texts here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["RouterConfig"]


def flag(default: Any, help: str) -> Any:
    """A field that is also a command-line flag, `--its-name`, with `help`."""
    return field(default=default, metadata={"help": help})


def secret(help: str) -> Any:
    """A flag that nothing may show."""
    return field(default="", repr=False, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router, as started. Times are seconds."""

    engines: tuple[str, ...] = ()  # URLs
    strategy: str = "data_parallel"  # a name, or the path of a .py file
    params: Mapping[str, Any] = field(default_factory=dict)
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 takes a free one")
    served_model_name: str = flag("", "what clients call the model; empty: as the engines do")
    tls_cert: str = flag("", "certificate chain (PEM); with --tls-key: https")
    tls_key: str = flag("", "its key (PEM)")
    engine_ca: str = flag("", "certificates (PEM) that those of https engines are signed by")
    api_key: str = secret("key that clients must send; empty: none")
    api_key_file: str = flag(
        "", "file of such keys, 'KEY [name=N] [rpm=N] [tpm=N]' a line; watched"
    )
    requests_per_minute: int = flag(0, "of each API key, or of all without keys; 0: no limit")
    tokens_per_minute: int = flag(0, "tokens in and out, likewise; 0: no limit")
    admin_key: str = secret("key of the admin API; empty: it answers on loopback only")
    engine_api_key: str = secret("key that the engines ask for")
    allow_upload: bool = flag(False, "let the admin API load strategies from source")
    max_body_mb: int = flag(16, "largest request body (MiB)")
    body_timeout_s: float = flag(30.0, "how long a client may take to send it, or a head (s)")
    client_stall_s: float = flag(60.0, "how long a client may not read its answer (s)")
    attempts: int = flag(3, "how often a request is tried, the first time included")
    retry_share: float = flag(
        0.2, "share of the requests in flight that may be on a retry; an engine lost is extra"
    )
    max_queue: int = flag(1024, "requests waiting for room on an engine, at most; then 429")
    queue_timeout_s: float = flag(60.0, "how long a request waits for room on an engine (s)")
    engine_wait_s: float = flag(
        0.0, "how long a request that has begun waits for an engine, where none is up (s)"
    )
    request_timeout_s: float = flag(3600.0, "how long a request may take in all (s)")
    connect_timeout_s: float = flag(2.0, "how long connecting to an engine may take (s)")
    health_interval_s: float = flag(0.5, "how often an engine is asked for its state (s)")
    health_timeout_s: float = flag(2.0, "how long it may be silent until it counts as down (s)")
    forget_s: float = flag(300.0, "how long an engine that announced itself may be down (s)")
    engines_file: str = flag(
        "", "file of engines, 'URL [role=ROLE] [LABEL=VALUE]…' a line; watched"
    )
    watch_s: float = flag(1.0, "how often watched files are looked at (s)")
    breaker_failures: int = flag(5, "failed calls in a row until an engine is left alone a while")
    breaker_open_s: float = flag(5.0, "how long it is left alone (s)")
    release_timeout_s: float = flag(2.0, "how long ending a lease or a stream may take (s)")
    stall_s: float = flag(60.0, "how long a strategy may wait while no engine works for it (s)")
    grace_s: float = flag(3.0, "how long a strategy may take to end once it is cancelled (s)")
    block_limit_s: float = flag(0.5, "how long a strategy may hold up the event loop (s)")
    block_strikes: int = flag(3, "how often it may do so until it is rolled back")
    audit_log: str = flag("", "file that every change of strategy is appended to; empty: none")
    shutdown_s: float = flag(2.0, "how long requests may go on after SIGTERM (s)")
    stream_interval_ms: float = flag(
        20.0, "tokens of a stream that come faster go out together, once in so long; 0: one by one"
    )
    max_receipts: int = flag(2048, "receipts kept, the newest")
    log_format: Literal["text", "json"] = flag("text", "lines for people, or an object a line")
    log_level: str = flag("warning", "debug, info, warning or error")
    parent_pid: int = flag(0, "stop when this process dies; 0: do not")
