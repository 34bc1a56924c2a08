"""How engines on other hosts reach this one: address, ports, interface; and checks of puts."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Literal

from kvcache.errors import BadRequest

__all__ = ["ANY_PORT", "LOOPBACK", "Network", "Verify", "listen"]

Verify = Literal["off", "sampled", "always"]
ANY_PORT = range(1)  # port 0: one that the kernel chooses


@dataclass(frozen=True, slots=True)
class Network:
    """The network over which KV goes to and comes from other hosts."""

    host: str  # address of this host, at which peers reach it; empty: none is known
    ports: range = ANY_PORT  # to listen at
    interface: str = ""  # in UCX's words, such as `eth0` or `mlx5_0:1`; empty: as UCX finds
    verify: Verify = "sampled"  # which bytes of a put are read back and compared

    def check(self) -> None:
        """Raise `BadRequest` for an address that peers cannot reach."""
        try:
            wildcard = ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            wildcard = not self.host
        if wildcard:
            raise BadRequest(f"peers cannot reach the address {self.host!r}", param="host")

    @property
    def reaches_out(self) -> bool:
        """Whether other hosts may reach the address."""
        return bool(self.host) and not self.is_loopback

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def configure_ucx(self) -> None:
        """Set UCX's interfaces and ports for this process, unless its environment does.

        UCX has no authentication and by default listens on all interfaces, so an engine at a
        loopback address uses the loopback only.
        """
        interface = self.interface or ("lo" if self.is_loopback else "")
        if interface:
            os.environ.setdefault("UCX_NET_DEVICES", interface)
        if len(self.ports) > 1:
            os.environ.setdefault("UCX_TCP_PORT_RANGE", f"{self.ports[0]}-{self.ports[-1]}")


LOOPBACK = Network("127.0.0.1")


def listen(host: str, ports: range, *, backlog: int) -> socket.socket:
    """Listen at the first free one of `ports`. Raises `OSError` if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or len(ports) == 1:
                raise
    raise OSError(
        errno.EADDRINUSE, f"all ports from {ports[0]} to {ports[-1]} of {host} are in use"
    )
