"""Service: the engine's calls as async functions, free of HTTP.

May import `engine.execution`, `engine.text` and below. Most classes live on one asyncio event loop.
"""
