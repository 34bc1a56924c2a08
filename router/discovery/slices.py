"""What EndpointSlices say: which engines there are, and which of these are about to end.

The types have the fields of `discovery.k8s.io/v1` that matter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from engine.protocol import BadRequest
from router.engines import ROLES, EngineEntry, Role, engine_url

__all__ = ["EndpointSlice", "Metadata", "engines_of"]

MOST_ENGINES = 4096
COMPONENT = "app.kubernetes.io/component"  # of the service; its slices have its labels
SERVICE = "kubernetes.io/service-name"


class Metadata(Struct, rename="camel"):
    """Of a slice, a list or a bookmark."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    continue_: str = field(default="", name="continue")


class Conditions(Struct):
    """Of an endpoint; what is null is unknown. `ready` is always true where a service publishes
    endpoints that are not ready, so `serving` counts."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Pod(Struct):
    """The object behind an endpoint."""

    name: str = ""
    uid: str = ""


class Endpoint(Struct, rename="camel"):
    """A pod. Its addresses are interchangeable."""

    addresses: list[str]
    conditions: Conditions = field(default_factory=Conditions)
    target_ref: Pod | None = None
    node_name: str | None = None
    zone: str | None = None

    @property
    def terminating(self) -> bool:
        return bool(self.conditions.terminating)

    @property
    def serving(self) -> bool:
        """Unknown is to be taken as true."""
        conditions = self.conditions
        said = conditions.ready if conditions.serving is None else conditions.serving
        return said is not False


class Port(Struct, rename="camel"):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None
    app_protocol: str | None = None


class EndpointSlice(Struct, rename="camel"):
    """Some endpoints of a service, with one type of address."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


def engines_of(
    slices: Iterable[EndpointSlice], known: Iterable[str] = ()
) -> dict[str, EngineEntry]:
    """Return the engines that the router should use, by URL.

    These are the endpoints that serve and do not terminate. One of `known` that does not serve
    stays, since the router checks its health itself; one that terminates does not. A pod with
    addresses of both families counts once, by its IPv4 address. There are `MOST_ENGINES` at most.
    """
    known, pods = set(known), set[str]()
    found: dict[str, EngineEntry] = {}
    for one in sorted(slices, key=lambda one: (one.address_type, one.metadata.name)):
        port = _port(one)
        if port is None or one.address_type not in ("IPv4", "IPv6"):
            continue
        for endpoint in one.endpoints or ():
            if endpoint.terminating or not endpoint.addresses or len(found) >= MOST_ENGINES:
                continue
            pod = endpoint.target_ref.uid if endpoint.target_ref is not None else ""
            if one.address_type == "IPv6" and pod and pod in pods:
                continue
            entry = _entry(one, endpoint, port)
            if entry is not None and (endpoint.serving or entry.url in known):
                pods.add(pod)
                found[entry.url] = entry
    return found


def _port(one: EndpointSlice) -> Port | None:
    """Return the port named `http` or `https`, else the first."""
    ports = [port for port in one.ports or () if port.port is not None]
    named = [port for port in ports if port.name in ("http", "https")]
    return next(iter(named or ports), None)


def _entry(one: EndpointSlice, endpoint: Endpoint, port: Port) -> EngineEntry | None:
    """Return the engine at an endpoint; None if the address is none."""
    address = endpoint.addresses[0]
    host = f"[{address}]" if one.address_type == "IPv6" else address
    secure = "https" in (port.name, port.app_protocol)
    try:
        url = engine_url(f"{'https' if secure else 'http'}://{host}:{port.port}")
    except BadRequest:
        return None
    of_slice = one.metadata.labels or {}
    told = {
        "service": of_slice.get(SERVICE),
        "pod": endpoint.target_ref.name if endpoint.target_ref is not None else None,
        "node": endpoint.node_name,
        "zone": endpoint.zone,
    }
    return EngineEntry(url, _role(of_slice), {name: said for name, said in told.items() if said})


def _role(labels: Mapping[str, str]) -> Role | None:
    """Return the role that a service's label gives its engines; None: that which they report."""
    return next((role for role in ROLES if role == labels.get(COMPONENT)), None)
