"""The TLS context with which an engine calls others."""

from __future__ import annotations

import ssl

__all__ = ["client_context"]


def client_context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    """Return a context that trusts `ca` (a PEM file), or the system's authorities if it is empty.

    The engine shows the certificate in `cert`, if there is one, to servers that ask for it. Raises
    `OSError` for files that are missing or invalid.
    """
    context = ssl.create_default_context(cafile=ca or None)
    if cert:
        context.load_cert_chain(cert, key)
    return context
