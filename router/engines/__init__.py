"""The engines: their calls over HTTP, their health, and what their prefix caches hold.

Imports `model`, `telemetry` and `base`.
"""
