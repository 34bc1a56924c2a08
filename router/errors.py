"""What the router adds to the tree of `kvcache.errors`.

MicroserveError
├── PeerUnreachable
│   └── EngineUnreachable  502  the router itself lost, or never had, this engine
│       └── NobodyListens  502  its address refuses connections: no process is there
├── NoEngines              503  nothing to run on
├── StrategyError          500  the strategy broke its contract; names the strategy
├── ModelNotFound          404  the request names a model that is not served here
├── NotFound               404  no such thing to administer
├── Forbidden              403  an admin call from where none is taken
└── Conflict               409  somebody else changed it first
"""

from __future__ import annotations

from engine.protocol import MicroserveError, PeerUnreachable

__all__ = [
    "Conflict",
    "EngineUnreachable",
    "Forbidden",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoEngines",
    "NobodyListens",
    "NotFound",
    "StrategyError",
    "root_cause",
]


class EngineUnreachable(PeerUnreachable):
    pass


class NobodyListens(EngineUnreachable):
    pass


class NoEngines(MicroserveError):
    type = "no_engines"
    status = 503


class StrategyError(MicroserveError):
    type = "strategy_error"
    status = 500


class ModelNotFound(MicroserveError):
    type = "model_not_found"
    status = 404


class NotFound(MicroserveError):
    type = "not_found"
    status = 404


class Forbidden(MicroserveError):
    type = "forbidden"
    status = 403


class MethodNotAllowed(MicroserveError):
    type = "method_not_allowed"
    status = 405


class Conflict(MicroserveError):
    type = "conflict"
    status = 409


def root_cause(error: BaseException) -> BaseException:
    """The first of ours in an exception group (task groups make them), else its first leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [root_cause(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, MicroserveError)), leaves[0])
