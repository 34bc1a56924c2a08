"""Web: what an HTTP server checks and limits before a request reaches its handler.

Engines and routers share it. `call_peer` bounds what engines receive in reply to their own calls.
May import `engine.protocol`; importable without torch.
"""

from engine.web.bodies import BodyBudget
from engine.web.connection import ClientConnection, check_input, linger, read_body
from engine.web.connection_limit import (
    ConnectionLimit,
    LimitedHttpProtocol,
    check_place,
    most_connections,
)
from engine.web.hosts import SAFE_METHODS, AllowedHosts, check_origin, is_loopback
from engine.web.peers import PeerReply, call_peer
from engine.web.protocol import BoundedHttpProtocol
from engine.web.slow_clients import SlowClients
from engine.web.tls import client_context

__all__ = [
    "SAFE_METHODS",
    "AllowedHosts",
    "BodyBudget",
    "BoundedHttpProtocol",
    "ClientConnection",
    "ConnectionLimit",
    "LimitedHttpProtocol",
    "PeerReply",
    "SlowClients",
    "call_peer",
    "check_input",
    "check_origin",
    "check_place",
    "client_context",
    "is_loopback",
    "linger",
    "most_connections",
    "read_body",
]
