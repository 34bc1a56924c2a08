"""Plain OpenAI servers as engines: vLLM, SGLang, llama.cpp and others, without calls about KV.

Imports of `router.engines` what knows no fleet: the client, lines, and the protocol of the calls.
"""

from router.engines.openai.address import ServerAddress
from router.engines.openai.description import Descriptions
from router.engines.openai.engine import OpenAIEngine

__all__ = ["Descriptions", "OpenAIEngine", "ServerAddress"]
