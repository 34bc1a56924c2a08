"""Web: what an HTTP server checks and limits before a request reaches its handler.

Engines and routers share it. May import `engine.protocol`; importable without torch.
"""

from engine.web.bodies import BodyBudget
from engine.web.connection import ClientConnection, check_input, linger, read_body
from engine.web.hosts import SAFE_METHODS, AllowedHosts, check_origin, is_loopback
from engine.web.protocol import BoundedHttpProtocol
from engine.web.slow_clients import SlowClients

__all__ = [
    "SAFE_METHODS",
    "AllowedHosts",
    "BodyBudget",
    "BoundedHttpProtocol",
    "ClientConnection",
    "SlowClients",
    "check_input",
    "check_origin",
    "is_loopback",
    "linger",
    "read_body",
]
