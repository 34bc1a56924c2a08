"""API: the engine's calls over HTTP.

May import `engine.service` and below.
"""
