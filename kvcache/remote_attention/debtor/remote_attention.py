"""The debtor's side: queries go to all creditors of a step at once, and their parts come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from kvcache.errors import BadRequest, PeerUnreachable
from kvcache.lease import Identity
from kvcache.lending import CreditorFailed
from kvcache.remote_attention.debtor.channel import Answer, CreditorChannel
from kvcache.remote_attention.debtor.entry import enter
from kvcache.remote_attention.debtor.estimates import Estimate
from kvcache.remote_attention.exchange import AttentionShape, Limits, RemoteSpan
from kvcache.types import EngineId

__all__ = ["RemoteAttention"]


class RemoteAttention:
    """The creditors of an engine, and the exchange of a step with them.

    One thread runs steps: `begin_step`, then for each layer `send` and `receive`, which have
    computations of its own between them. Other threads may `connect` and `disconnect` meanwhile.
    """

    def __init__(
        self, identity: Identity, shape: AttentionShape, *, timeout_s: float = 5.0
    ) -> None:
        """A creditor that has not answered `timeout_s` seconds after a query is lost.

        The time has to cover what the creditor's cap makes it wait.
        """
        self.shape = shape
        self._identity, self._timeout_s = identity, timeout_s
        self._lock = threading.Lock()
        self._channels: dict[EngineId, CreditorChannel] = {}
        self._step = 0
        self._asked: list[CreditorChannel] = []  # that have spans in the step
        self._failures: list[CreditorFailed] = []  # of the layer under way
        self._deadline = 0.0  # of the layer under way
        self._layer: int | None = None  # sent and not received

    def connect(self, creditor: EngineId, endpoints: Sequence[str], epoch: int) -> None:
        """Connect to a process of a creditor, at the first endpoint that can be reached.

        Replaces an earlier connection. Blocks for seconds, so not in the thread that runs steps.
        Raises `PeerUnreachable` if none can be reached, `StaleEpoch` if the creditor has been
        restarted, and `BadRequest` if its pages have another shape.
        """
        missing = PeerUnreachable(f"{creditor} has no endpoint")
        for endpoint in endpoints:
            try:
                entered = enter(endpoint, epoch, self._identity, self.shape, self._timeout_s)
            except PeerUnreachable as error:
                missing = error
                continue
            connection, limits, buffers = entered
            channel = CreditorChannel(creditor, connection, self.shape, limits, buffers)
            with self._lock:
                before = self._channels.get(creditor)
                self._channels[creditor] = channel
            if before is not None:
                before.close()
            return
        raise missing

    def disconnect(self, creditor: EngineId) -> None:
        """Disconnect from a creditor, if connected."""
        with self._lock:
            channel = self._channels.pop(creditor, None)
        if channel is not None:
            channel.close()

    def connected(self) -> list[EngineId]:
        """Return the creditors that can be asked now."""
        with self._lock:
            return [name for name, channel in self._channels.items() if not channel.closed]

    def limits(self, creditor: EngineId) -> Limits | None:
        """Return what a creditor computes in a step, at most; None if it is not connected."""
        with self._lock:
            channel = self._channels.get(creditor)
        return channel.limits if channel is not None else None

    def estimate(self, creditor: EngineId) -> Estimate:
        """Return how fast a creditor answers. Raises `PeerUnreachable` if it is not connected."""
        return self._channel(creditor).estimate.now()

    def begin_step(self, spans: Mapping[EngineId, Sequence[RemoteSpan]]) -> None:
        """Tell each creditor the rows of the step and the held pages of their sequences.

        Every creditor has a span or more. What is outstanding of an earlier step is drained first.
        Raises `CreditorFailed` for one that is not connected, or lost.
        """
        self.abort_step()
        self._step += 1
        deadline = time.monotonic() + self._timeout_s
        for creditor, some in spans.items():
            try:
                channel = self._channel(creditor)
                if not some:
                    raise BadRequest(f"no spans for {creditor}")
                self._asked.append(channel)
                channel.plan(self._step, some, deadline)
            except CreditorFailed as failure:
                self._fail([failure])
            except PeerUnreachable as error:
                loans = tuple(dict.fromkeys(each.loan for span in some for each in span.borrowed))
                self._fail([CreditorFailed(creditor, loans, error, lost=True)])

    def send(self, layer: int, q: torch.Tensor) -> None:
        """Send the queries of a layer to all creditors of the step.

        `q` is `[rows, heads, head_dim]`, of all rows of the step. A creditor that is lost is
        reported by `receive`. Raises `BadRequest` for queries of another shape, or while the answer
        of a layer is awaited.
        """
        if self._layer is not None:
            raise BadRequest(f"layer {self._layer} has not been received")
        self._layer = layer
        self._deadline = time.monotonic() + self._timeout_s
        for channel in self._asked:
            try:
                channel.query(layer, q, self._deadline)
            except CreditorFailed as failure:
                self._failures.append(failure)

    def receive(self, layer: int) -> dict[EngineId, Answer]:
        """Wait for the answers of all creditors, and return them.

        Their rows are views of buffers, valid until the next `send`. Raises `CreditorFailed` if a
        creditor has refused or is lost, after the answers of the others have been read: the step
        ends with it. Takes no longer than the timeout from `send` on.
        """
        if self._layer != layer:
            raise BadRequest(f"layer {layer} was not sent")
        found: dict[EngineId, Answer] = {}
        failed = {failure.creditor for failure in self._failures}
        for channel in self._asked:
            if channel.creditor in failed:
                continue
            try:
                found[channel.creditor] = channel.answer(layer, self._deadline)
            except CreditorFailed as failure:
                self._failures.append(failure)
        self._layer = None
        if self._failures:
            self._fail(self._failures)
        return found

    def abort_step(self) -> None:
        """End a step, and drain what is outstanding of it. Takes no longer than the timeout."""
        deadline = time.monotonic() + self._timeout_s
        for channel in self._asked:
            if not channel.closed:
                try:
                    channel.drain(deadline)
                except CreditorFailed:
                    continue  # it is closed, and the next step that needs it fails
        self._asked, self._failures, self._layer = [], [], None

    def close(self) -> None:
        """Disconnect from all creditors."""
        for creditor in list(self._channels):
            self.disconnect(creditor)

    def _channel(self, creditor: EngineId) -> CreditorChannel:
        with self._lock:
            channel = self._channels.get(creditor)
        if channel is None or channel.closed:
            raise PeerUnreachable(f"{creditor} is not connected")
        return channel

    def _fail(self, failures: list[CreditorFailed]) -> None:
        """End the step, and raise the first failure."""
        first, *others = failures
        first.also = tuple(others)
        self.abort_step()
        raise first
