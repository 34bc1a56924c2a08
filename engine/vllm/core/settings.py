"""What the lead tells the code in the engine core when it starts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvcache.errors import Internal
from kvcache.transport import Network, Verify

__all__ = ["SECRET", "CoreSettings"]

SECRET = "MICROSERVE_SECRET"  # noqa: S105  the name of the variable; vLLM logs its settings


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Fields are those of the engine's flags, unless stated otherwise."""

    engine_id: str
    epoch: int
    url: str
    weights: str  # digest of the weights and of all else that determines keys and values
    notes: str  # path of the unix socket to which notes go
    transport: Literal["auto", "shm", "nixl", "cuda_ipc"]
    kv_host: str  # EngineConfig.kv_address
    kv_ports: tuple[int, int]  # the first one, and the one behind the last
    kv_interface: str
    verify_puts: Verify
    lead: int  # process id of the lead

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> CoreSettings:
        """Return the settings in a connector's extra configuration. Raises `Internal`."""
        try:
            return cls(**values)
        except TypeError as error:
            raise Internal(f"the connector is started by --backend vllm only: {error}") from None

    def values(self) -> dict[str, Any]:
        """Return the extra configuration that `read` reads."""
        return asdict(self)

    @property
    def network(self) -> Network:
        """How other hosts reach this engine."""
        return Network(self.kv_host, range(*self.kv_ports), self.kv_interface, self.verify_puts)

    @property
    def secret(self) -> bytes:
        """The cluster secret, which the lead leaves in the environment."""
        return os.environ.get(SECRET, "").encode()
