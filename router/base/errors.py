"""The errors that the router adds to the tree of `engine.protocol`.

MicroserveError
├── PeerUnreachable
│   └── EngineUnreachable  502  the router cannot reach the engine, or has lost it
│       └── NobodyListens  502  its address refuses connections: no process listens
├── Draining
│   └── Moved              503  the request continues elsewhere: its engine is being drained
├── Internal
│   └── BadReply           500  the engine breaks the protocol; it may have done what was asked
├── NoEngines              503  no engine is up
├── StoreUnavailable       503  the store that the routers share does not answer
│   └── StoreUnreadable    503  it answers, but holds what this version does not understand
├── StrategyError          500  the strategy broke its contract; the message names it
│   ├── StrategyBlocked    500  it blocked the event loop and was interrupted
│   └── StrategyStalled    504  it waited while no engine was working for it
├── NoCapacity
│   ├── RateLimited        429  over the limit of an API key
│   └── Overloaded
│       └── OutOfFiles     503  the router itself cannot open another connection to an engine
├── MethodNotAllowed       405  the path is there, but not for this method
├── UnsupportedMediaType   415  a body of the admin API that is not declared as JSON
├── ModelNotFound          404  the request names a model that is not served here
├── NotFound               404  the admin API knows no such object
└── Conflict               409  another change came first
"""

from __future__ import annotations

from engine.protocol import (
    Draining,
    Internal,
    MicroserveError,
    NoCapacity,
    Overloaded,
    PeerUnreachable,
)

__all__ = [
    "BadReply",
    "Conflict",
    "EngineUnreachable",
    "MethodNotAllowed",
    "ModelNotFound",
    "Moved",
    "NoEngines",
    "NobodyListens",
    "NotFound",
    "OutOfFiles",
    "RateLimited",
    "StartFailed",
    "StoreUnavailable",
    "StoreUnreadable",
    "StrategyBlocked",
    "StrategyError",
    "StrategyStalled",
    "UnsupportedMediaType",
    "root_cause",
]


class EngineUnreachable(PeerUnreachable):
    pass


class NobodyListens(EngineUnreachable):
    pass


class BadReply(Internal):
    pass


class Moved(Draining):
    pass


class NoEngines(MicroserveError):
    type = "no_engines"
    status = 503


class StoreUnavailable(MicroserveError):
    type = "store_unavailable"
    status = 503


class StoreUnreadable(StoreUnavailable):
    """The store answers, but holds what this version does not understand."""


class StrategyError(MicroserveError):
    type = "strategy_error"
    status = 500


class StrategyBlocked(StrategyError):
    type = "strategy_blocked"


class StrategyStalled(StrategyError):
    type = "strategy_stalled"
    status = 504


class RateLimited(NoCapacity):
    type = "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit  # "requests" or "tokens"


class OutOfFiles(Overloaded):
    pass


class ModelNotFound(MicroserveError):
    type = "model_not_found"
    status = 404


class NotFound(MicroserveError):
    type = "not_found"
    status = 404


class MethodNotAllowed(MicroserveError):
    type = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed  # methods


class UnsupportedMediaType(MicroserveError):
    type = "unsupported_media_type"
    status = 415


class Conflict(MicroserveError):
    type = "conflict"
    status = 409


class StartFailed(Exception):
    """A child process ended before it was ready; the message has the end of its log.

    Outside the tree: it belongs to no request, and no client receives it.
    """


def root_cause(error: BaseException) -> BaseException:
    """Return the first `MicroserveError` in an exception group, else its first leaf.

    An exception that is no group is returned as it is.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [root_cause(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, MicroserveError)), leaves[0])
