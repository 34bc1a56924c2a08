"""The connection to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from importlib.util import find_spec
from typing import Any, Final

from router.ray_fleet.plan import Impossible

__all__ = ["NAMESPACE", "connect"]

NAMESPACE = "microserve"  # Ray's namespace of all fleets
CONNECT_S: Final = 10.0
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
        ray.init(
            address=address,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=logs,
        )
    except (ConnectionError, TimeoutError, OSError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        if said[0].endswith(":"):  # a traceback of the server follows
            said[0] += f" {said[-1]}"
        raise Impossible(
            f"no Ray cluster at {address}: {said[0]}; "
            "`ray start --head` starts one, `--on ray://HOST:10001` names one elsewhere"
        ) from None
    return ray


def _reach(address: str) -> None:
    """Raise `OSError` if nothing listens at `HOST:PORT`, where Ray itself tries for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and not address.startswith("ray://"):
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
