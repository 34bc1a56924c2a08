"""The connection to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from importlib.util import find_spec
from itertools import count
from time import monotonic
from typing import Any, Final

from router.ray_fleet.plan import Impossible

__all__ = ["NAMESPACE", "connect"]

log = logging.getLogger(__name__)

NAMESPACE = "microserve"  # Ray's namespace of all fleets
CONNECT_S: Final = 10.0
# Ray's proxy on the head forks a server for each client of ray://, and has threads of gRPC. If one
# of them is in a call during the fork, the child has at times ended by SIGABRT or SIGSEGV, in code
# of gRPC and before it executed anything (seen with Ray 2.60 and grpcio 1.85). The proxy answers
# with the first of these texts, or with the second if the child dies just as the proxy looks at its
# command. The next client gets another server, so it is enough to connect again.
# 6 of 27 connections failed so, and of 22 none with GRPC_ENABLE_FORK_SUPPORT=0 for the head.
DIED_IN_FORK: Final = ("Starting Ray client server failed", "psutil.ZombieProcess")
ATTEMPTS: Final = 5
RETRY_S: Final = 180.0  # after this no attempt begins; one that fails takes Ray up to 45 s
MISSING = "Ray is not installed; `pip install 'microserve[ray]'` installs it"


def connect(address: str, *, logs: bool = False) -> Any:
    """Return the module `ray`, connected to a cluster.

    `address` is `auto` (the cluster that this machine belongs to, or RAY_ADDRESS),
    `ray://HOST:PORT` (Ray Client, from outside of the cluster) or `HOST:PORT` (of the head, from
    within). With `logs`, what actors print appears on this process's standard output. Raises
    `Impossible`.
    """
    if find_spec("ray") is None:
        raise Impossible(MISSING)
    if address.startswith("ray://") and find_spec("grpc") is None:
        raise Impossible("ray:// needs grpcio; `pip install 'microserve[ray]'` installs it")
    import ray

    try:
        _reach(address)
        _init(ray, address, logs=logs)
    except (ConnectionError, TimeoutError, OSError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        if said[0].endswith(":"):  # a traceback of the server follows
            said[0] += f" {said[-1]}"
        raise Impossible(
            f"no Ray cluster at {address}: {said[0]}; "
            "`ray start --head` starts one, `--on ray://HOST:10001` names one elsewhere"
        ) from None
    return ray


def _init(ray: Any, address: str, *, logs: bool) -> None:
    """Connect; for `ray://` again if the server of this client died as it was forked."""
    ends = monotonic() + RETRY_S
    for attempt in count(1):
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                log_to_driver=logs,
            )
            return
        except ConnectionAbortedError as error:
            died = any(text in str(error) for text in DIED_IN_FORK)
            if (
                not died
                or not address.startswith("ray://")
                or attempt == ATTEMPTS
                or monotonic() >= ends
            ):
                raise
            log.info("Ray's server for this client died as it was started; attempt %d", attempt + 1)


def _reach(address: str) -> None:
    """Raise `OSError` if nothing listens at `HOST:PORT`, where Ray itself tries for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and not address.startswith("ray://"):
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
