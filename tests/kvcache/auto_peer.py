"""A second process with the `auto` transport, which is on this host or says that it is not."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shm_peer import Commands

from kvcache.transport import AutoTransport, Network, Transport, auto, endpoint
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.nixl.target import NixlTarget

__all__ = ["FarCommands", "NearCommands"]


class NearCommands(Commands):
    target = MappedTarget

    def __init__(self, host: str, environment: Mapping[str, str], name: str, epoch: int) -> None:
        os.environ.update(environment)
        self._host = host
        super().__init__(name, epoch)

    def transport(self, epoch: int) -> Transport:
        return AutoTransport(epoch, secret=b"wire", network=Network(self._host))


class FarCommands(NearCommands):
    """As in another container: the network is the only way."""

    target = NixlTarget

    def __init__(self, host: str, environment: Mapping[str, str], name: str, epoch: int) -> None:
        for module in (endpoint, auto):
            module.host_id = lambda: "elsewhere"  # type: ignore[attr-defined]
        super().__init__(host, environment, name, epoch)
