"""The errors that clients can see; each carries the wire name of its type.

    MicroserveError
    ├── BadRange          400  a range that does not lie in the prompt
    ├── BadRequest        400  an invalid body or parameter
    ├── Unauthorized      401  a missing or wrong API key
    ├── BadAddress        401  a kv_addr that is forged, malformed, or for other weights or prompt
    ├── Forbidden         403  a call from a place that may not make it
    ├── UnknownLease      404  no such lease here
    ├── SlowClient        408  the client did not send its body in time
    ├── LeaseExpired      410  the lease has ended
    ├── DuplicateRequest  409  a request with this id is live here
    ├── KVIncomplete      409  fewer tokens have landed than the call relies on
    ├── StaleEpoch        409  the engine was restarted since the address was made
    ├── TooLarge          413  a body over the limit
    ├── NoCapacity        429  no pages or no queue slot now; carries retry_after_s
    │   └── Overloaded    503  no room for this connection, or for the body of this request
    ├── PeerUnreachable   502  the other engine cannot be reached
    ├── Draining          503  this engine takes no new work
    ├── Timeout           504  a deadline passed
    ├── Unsupported       501  this engine cannot do that; others may
    └── Internal          500  a defect in this process; logged with its traceback

The KV cache raises some of these, so the tree is in the lowest layer. `engine.protocol` exports it
to the router and maps it to and from HTTP.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadAddress",
    "BadRange",
    "BadRequest",
    "Draining",
    "DuplicateRequest",
    "Forbidden",
    "Internal",
    "KVIncomplete",
    "LeaseExpired",
    "MicroserveError",
    "NoCapacity",
    "Overloaded",
    "PeerUnreachable",
    "SlowClient",
    "StaleEpoch",
    "Timeout",
    "TooLarge",
    "Unauthorized",
    "UnknownLease",
    "Unsupported",
]


class MicroserveError(Exception):
    """Base of all errors with a wire form: `type` is its name there, `status` its HTTP status."""

    type: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        # Half of a surrogate pair can be in the text of a strategy's error, but in no JSON.
        self.message = str(message).encode("utf-8", "backslashreplace").decode()
        self.param = param
        self.code = code


class BadRange(MicroserveError):
    type = "bad_range"
    status = 400


class BadRequest(MicroserveError):
    type = "bad_request"
    status = 400


class Unauthorized(MicroserveError):
    type = "unauthorized"
    status = 401


class BadAddress(MicroserveError):
    type = "bad_address"
    status = 401


class Forbidden(MicroserveError):
    type = "forbidden"
    status = 403


class SlowClient(MicroserveError):
    type = "slow_client"
    status = 408


class UnknownLease(MicroserveError):
    type = "unknown_lease"
    status = 404


class LeaseExpired(MicroserveError):
    type = "lease_expired"
    status = 410


class DuplicateRequest(MicroserveError):
    type = "duplicate_request"
    status = 409


class KVIncomplete(MicroserveError):
    type = "kv_incomplete"
    status = 409


class StaleEpoch(MicroserveError):
    type = "stale_epoch"
    status = 409


class TooLarge(MicroserveError):
    type = "too_large"
    status = 413


class NoCapacity(MicroserveError):
    """No room now. Retry in `retry_after_s` seconds, which travels as `Retry-After`."""

    type = "no_capacity"
    status = 429

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class Overloaded(NoCapacity):
    type = "overloaded"
    status = 503


class PeerUnreachable(MicroserveError):
    type = "peer_unreachable"
    status = 502


class Draining(MicroserveError):
    type = "draining"
    status = 503


class Timeout(MicroserveError):
    type = "timeout"
    status = 504


class Unsupported(MicroserveError):
    type = "unsupported"
    status = 501


class Internal(MicroserveError):
    type = "internal"
    status = 500
