"""`kv_addr`: the signed address of a receive lease."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcache.errors import BadAddress
from kvcache.shard import Shard
from kvcache.types import EngineId, LeaseId, PageId, SlotIndex

__all__ = ["KVAddress", "prompt_digest"]

MAC_BYTES = 16
_TEXTS = ("engine_id", "url", "endpoint", "lease_id", "fingerprint", "digest")
_NUMBERS = ("epoch", "slot", "nonce", "begin", "end", "room")


def prompt_digest(tokens: Sequence[int]) -> str:
    """Return a digest of token ids, which binds an address to one prompt."""
    raw = np.asarray(tokens, dtype=np.int64).tobytes()
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class KVAddress:
    """Room for the KV of `prompt[begin:end]` and its continuation, up to position `room`.

    `begin` is a multiple of the page size. `runs` are the owner's pages from position `begin` on:
    pairs of a first page and a count of consecutive pages.
    """

    engine_id: EngineId
    epoch: int
    url: str  # of the owner's HTTP API, to extend the lease; empty if there is none
    endpoint: str  # of the owner's transport, as in "shm:<pid>:<fd>"
    lease_id: LeaseId
    slot: SlotIndex  # of the lease, in the owner's control block
    nonce: int  # in that slot while the lease is live
    begin: int
    end: int
    room: int  # tokens, with those before `begin`
    runs: tuple[tuple[int, int], ...]
    fingerprint: str
    digest: str  # of prompt[:end]
    shards: tuple[Shard, ...] = ()  # the parts in the owner's pool, as `PoolLayout.shards`

    def pages(self) -> list[PageId]:
        """Return the pages of `runs` as one list."""
        return [PageId(first + i) for first, count in self.runs for i in range(count)]

    def sign(self, secret: bytes) -> str:
        """Return a URL-safe string: the fields and their HMAC-SHA256 under the cluster secret."""
        body = json.dumps(list(asdict(self).values()), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(_mac(secret, body) + body).decode().rstrip("=")

    @classmethod
    def verify(cls, text: str, secret: bytes) -> KVAddress:
        """Return the address that `sign` made into `text`. Raises `BadAddress` for other text."""
        try:
            padding = "=" * (-len(text) % 4)
            # altchars with validate: urlsafe_b64decode would skip over foreign characters
            raw = base64.b64decode(text.encode("ascii") + padding.encode(), b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise BadAddress("kv_addr is malformed", param="kv_addr") from None
        mac, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(secret, body)):
            raise BadAddress("kv_addr was not signed with this cluster's secret", param="kv_addr")
        try:
            return cls._read(json.loads(body))
        except (ValueError, TypeError):
            message = "kv_addr is of another version: the engines of a cluster need the same"
            raise BadAddress(message, param="kv_addr") from None

    @classmethod
    def _read(cls, fields: list[Any]) -> KVAddress:
        """Return the address of these fields. Raises `ValueError` or `TypeError` for others."""
        *values, runs, fingerprint, digest, shards = fields
        typed = [
            *values,
            tuple((first, count) for first, count in runs),
            fingerprint,
            digest,
            tuple(Shard(**shard) for shard in shards),
        ]
        address = cls(*typed)
        texts = [getattr(address, name) for name in _TEXTS]
        numbers = [getattr(address, name) for name in _NUMBERS]
        numbers += [number for run in address.runs for number in run]
        for shard in address.shards:
            numbers += asdict(shard).values()
        if any(type(text) is not str for text in texts):
            raise TypeError("a field is no text")
        if any(type(number) is not int or number < 0 for number in numbers):
            raise TypeError("a field is no number")
        return address


def page_runs(pages: Sequence[PageId]) -> tuple[tuple[int, int], ...]:
    """Return runs of consecutive pages as `(first, count)`."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.new(secret, body, hashlib.sha256).digest()[:MAC_BYTES]
