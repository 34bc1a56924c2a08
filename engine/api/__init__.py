"""API: the calls of the engine over HTTP, and its registration with a router.

May import `engine.service` and below. Imports nothing here: `registration` starts without torch.
"""
