"""The value of `--discover`: which services of which namespace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from engine.protocol import BadRequest

__all__ = ["SCHEME", "KubernetesServices", "parse_services"]

SCHEME = "k8s"
MOST_SERVICES = 32
# A DNS label (RFC 1123), as names of namespaces and of most services are.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesServices:
    """Services of one namespace; without a name it is this pod's own."""

    namespace: str
    names: tuple[str, ...]

    @property
    def selector(self) -> str:
        """The label selector of the services' EndpointSlices."""
        return f"kubernetes.io/service-name in ({','.join(self.names)})"


def parse_services(text: str) -> KubernetesServices:
    """Parse `k8s://NAMESPACE/SERVICE[,SERVICE]…`; `k8s:///SERVICE` is in this pod's namespace.

    Raises `BadRequest`.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    namespace, names = parts.netloc, tuple(parts.path.removeprefix("/").split(","))
    good = parts.scheme == SCHEME and not parts.query and not parts.fragment
    good = good and (not namespace or _NAME.fullmatch(namespace) is not None)
    good = good and all(_NAME.fullmatch(name) for name in names) and len(names) <= MOST_SERVICES
    if not good or len(set(names)) < len(names):
        raise BadRequest(
            f"--discover {text[:200]}: expected {SCHEME}://NAMESPACE/SERVICE[,SERVICE]…, with "
            f"{MOST_SERVICES} services at most, each once",
            param="discover",
        )
    return KubernetesServices(namespace, names)
