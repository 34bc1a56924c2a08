"""Errors, ids, configuration and small helpers. Imports no other room."""

from router.base.awake_clock import LATE_S, AwakeClock, fired_late
from router.base.cancel_scope import CancelScope
from router.base.config import RouterConfig
from router.base.environment import (
    PREFIX,
    bare_environment,
    child_environment,
    drop_service_links,
    hide_keys,
    import_from,
    module_command,
)
from router.base.errors import (
    BadReply,
    Conflict,
    EngineUnreachable,
    MethodNotAllowed,
    ModelNotFound,
    Moved,
    NobodyListens,
    NoEngines,
    NotFound,
    OutOfFiles,
    RateLimited,
    StartFailed,
    StoreUnavailable,
    StoreUnreadable,
    StrategyBlocked,
    StrategyError,
    StrategyStalled,
    UnsupportedMediaType,
    root_cause,
)
from router.base.ids import EngineId, EngineRequestId, LeaseId, RevisionNumber
from router.base.pauses import Pauses
from router.base.process import (
    adopt_orphans,
    die_with_parent,
    enter_namespaces,
    forbid_new_privileges,
    hide_memory,
)
from router.base.request import Chunk, Mirrored, Request, TokenId, Usage
from router.base.sse import DONE, EventSplitter
from router.base.tables import fits, print_table, table_console, table_of
from router.base.tls import client_context, server_context
from router.base.watched_file import changes_of

__all__ = [
    "DONE",
    "LATE_S",
    "PREFIX",
    "AwakeClock",
    "BadReply",
    "CancelScope",
    "Chunk",
    "Conflict",
    "EngineId",
    "EngineRequestId",
    "EngineUnreachable",
    "EventSplitter",
    "LeaseId",
    "MethodNotAllowed",
    "Mirrored",
    "ModelNotFound",
    "Moved",
    "NoEngines",
    "NobodyListens",
    "NotFound",
    "OutOfFiles",
    "Pauses",
    "RateLimited",
    "Request",
    "RevisionNumber",
    "RouterConfig",
    "StartFailed",
    "StoreUnavailable",
    "StoreUnreadable",
    "StrategyBlocked",
    "StrategyError",
    "StrategyStalled",
    "TokenId",
    "UnsupportedMediaType",
    "Usage",
    "adopt_orphans",
    "bare_environment",
    "changes_of",
    "child_environment",
    "client_context",
    "die_with_parent",
    "drop_service_links",
    "enter_namespaces",
    "fired_late",
    "fits",
    "forbid_new_privileges",
    "hide_keys",
    "hide_memory",
    "import_from",
    "module_command",
    "print_table",
    "root_cause",
    "server_context",
    "table_console",
    "table_of",
]
