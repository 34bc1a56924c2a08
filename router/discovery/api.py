"""Lists and watches EndpointSlices by Kubernetes's official client, within bounds.

The client's own `Watch` bounds no line. So the responses are read here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from engine.protocol import BadRequest, PeerUnreachable
from router.base import StartFailed
from router.discovery.address import parse_services
from router.discovery.slices import EndpointSlice, Metadata

if TYPE_CHECKING:
    from aiohttp import ClientResponse

__all__ = ["MOST_SLICES", "BadSlices", "SliceApi", "SlicesLost", "VersionGone", "open_slices"]

PAGE = 250  # slices of a list's reply
MOST_SLICES = 4096
MOST_REPLY = 32 << 20  # bytes of a list's reply
MOST_LINE = 4 << 20  # bytes of an event: a slice has 1000 endpoints at most
LIST_S = 15.0  # for a whole reply, and for the head of a watch
WATCH_S = 60  # after which the server ends a watch
LATE_S = 10.0  # a watch that is silent for longer than both is taken to be dead
MOST_ERROR = 1 << 16  # bytes
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
GONE = 410


class SlicesLost(PeerUnreachable):
    """The API server cannot be reached, or refuses."""


class BadSlices(SlicesLost):
    """It answers with what is no list or event, or with too much: list again."""


class VersionGone(SlicesLost):
    """It no longer knows the version from which to watch: list again."""


class Event(Struct):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _List(Struct):
    metadata: Metadata
    items: list[EndpointSlice]


class _Status(Struct):
    """Why a request failed."""

    code: int = 0
    message: str = ""


class _Bookmark(Struct):
    metadata: Metadata


class SliceApi:
    """The EndpointSlices of some services. One call at a time."""

    def __init__(self, api: Any, namespace: str, selector: str) -> None:
        """`api`: a `DiscoveryV1Api` of `kubernetes.aio`."""
        self._call = api.list_namespaced_endpoint_slice_without_preload_content
        self._common = {"namespace": namespace, "label_selector": selector}

    async def list(self) -> tuple[dict[str, EndpointSlice], str]:
        """Return all slices by name, and the version of this state. Raises `SlicesLost`."""
        slices: dict[str, EndpointSlice] = {}
        page = ""
        while True:
            async with within(LIST_S):
                response = await self._open(limit=PAGE, **({"_continue": page} if page else {}))
                try:
                    body = await _read(response, MOST_REPLY)
                finally:
                    response.close()
            try:
                found = msgspec.json.decode(body, type=_List)
            except msgspec.DecodeError as error:
                raise BadSlices(f"its list is none: {error}") from None
            slices |= {one.metadata.name: one for one in found.items}
            if len(slices) > MOST_SLICES:
                raise BadSlices(f"there are more than {MOST_SLICES} EndpointSlices")
            page = found.metadata.continue_
            if not page:
                return slices, found.metadata.resource_version

    async def watch(self, version: str) -> AsyncGenerator[tuple[str, EndpointSlice | None, str]]:
        """Yield the changes after `version`: kind, slice, and the new version.

        A bookmark has no slice. Ends when the server ends the watch, as it does after `WATCH_S`.
        Raises `SlicesLost`, and `VersionGone` if the changes are no longer known.
        """
        async with within(LIST_S):
            response = await self._open(
                watch=True,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
            )
        try:
            async for line in _lines(response):
                yield _change(line)
        finally:
            response.close()

    async def _open(self, **query: Any) -> ClientResponse:
        """Return the response to a request, with its body unread. Raises `SlicesLost`."""
        try:
            response: ClientResponse = await self._call(
                **self._common, **query, _request_timeout=WATCH_S + LATE_S
            )
        except TimeoutError:
            raise
        except Exception as error:  # aiohttp's, the client's own, and those of reading credentials
            raise SlicesLost(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return response
        try:
            status = msgspec.json.decode(await _read(response, MOST_ERROR), type=_Status)
        except (msgspec.DecodeError, SlicesLost):
            status = _Status()
        finally:
            response.close()
        raise _failure(_Status(response.status, status.message))


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise `SlicesLost` if the body takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SlicesLost(f"it did not answer within {seconds:g} s") from None


@asynccontextmanager
async def open_slices(text: str) -> AsyncIterator[SliceApi | None]:
    """The EndpointSlices that the value of `--discover` names; None if it is empty.

    They are read as this pod's service account, or outside of a cluster as kubeconfig says. Raises
    `BadRequest` if the value is malformed, the extra `kubernetes` is missing or the namespace is
    not known, and `StartFailed` if there are no credentials.
    """
    if not text:
        yield None
        return
    services = parse_services(text)
    try:
        from kubernetes.aio import client, config
    except ImportError:
        raise BadRequest(
            "--discover needs the extra: pip install 'microserve[kubernetes]'", param="discover"
        ) from None
    configuration = client.Configuration()
    inside = config.incluster_config.SERVICE_HOST_ENV_NAME in os.environ
    try:
        if inside:
            config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
            )
    except (config.ConfigException, OSError) as error:
        raise StartFailed(f"--discover: no access to Kubernetes: {error}") from None
    namespace = services.namespace or _own_namespace()
    async with client.ApiClient(configuration) as connection:
        yield SliceApi(client.DiscoveryV1Api(connection), namespace, services.selector)


def _own_namespace() -> str:
    try:
        return NAMESPACE.read_text().strip()
    except OSError:
        raise BadRequest(
            "--discover: outside of a pod the namespace must be named: k8s://NAMESPACE/SERVICE",
            param="discover",
        ) from None


async def _read(response: ClientResponse, most: int) -> bytes:
    """Read a body. Raises `SlicesLost` if it is longer than `most` bytes, or breaks off."""
    parts, size = [], 0
    async for part in _parts(response):
        size += len(part)
        if size > most:
            raise BadSlices(f"its answer has more than {most} bytes")
        parts.append(part)
    return b"".join(parts)


async def _lines(response: ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a body. Raises `SlicesLost` for one that is too long."""
    rest = bytearray()
    async for part in _parts(response):
        rest += part
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            if line.strip():
                yield line
        if len(rest) > MOST_LINE:
            raise BadSlices(f"an event has more than {MOST_LINE} bytes")


async def _parts(response: ClientResponse) -> AsyncIterator[bytes]:
    from aiohttp import ClientError

    try:
        async for part in response.content.iter_any():
            yield part
    except (ClientError, OSError) as error:
        raise SlicesLost(f"the connection broke: {error}") from None


def _change(line: bytes) -> tuple[str, EndpointSlice | None, str]:
    """Parse an event. Raises `SlicesLost`."""
    try:
        event = msgspec.json.decode(line, type=Event)
        if event.type == "ERROR":
            raise _failure(msgspec.json.decode(event.object, type=_Status))
        if event.type == "BOOKMARK":
            mark = msgspec.json.decode(event.object, type=_Bookmark)
            return event.type, None, mark.metadata.resource_version
        one = msgspec.json.decode(event.object, type=EndpointSlice)
    except msgspec.DecodeError as error:
        raise BadSlices(f"an event of the watch is none: {error}") from None
    return event.type, one, one.metadata.resource_version


def _failure(status: _Status) -> SlicesLost:
    kind = VersionGone if status.code == GONE else SlicesLost
    return kind(f"{status.code} {status.message[:500]}".strip())
