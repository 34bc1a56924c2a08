"""The engines: their calls over HTTP, their health, and what their prefix caches hold.

Imports `model`, `telemetry` and `base`.
"""

from router.engines.api import ChunkStream, Headers
from router.engines.backend import ROLES, Backend, Role, Source, guard
from router.engines.client import EngineClient
from router.engines.engines_file import EngineEntry, engine_url, parse_engine, parse_engines
from router.engines.http_client import HttpClient
from router.engines.openai import Descriptions, OpenAIEngine, ServerAddress
from router.engines.prefix_index import NOTHING, Expected, PrefixIndex
from router.engines.registry import Registry

__all__ = [
    "NOTHING",
    "ROLES",
    "Backend",
    "ChunkStream",
    "Descriptions",
    "EngineClient",
    "EngineEntry",
    "Expected",
    "Headers",
    "HttpClient",
    "OpenAIEngine",
    "PrefixIndex",
    "Registry",
    "Role",
    "ServerAddress",
    "Source",
    "engine_url",
    "guard",
    "parse_engine",
    "parse_engines",
]
