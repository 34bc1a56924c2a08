"""TLS contexts from certificate files."""

from __future__ import annotations

import ssl

from engine.protocol import BadRequest

__all__ = ["client_context", "server_context"]


def server_context(cert: str, key: str) -> ssl.SSLContext | None:
    """Return the context of a server with this certificate chain and key (PEM files).

    Returns `None` if neither is given. Raises `BadRequest` if only one is, or they are invalid.
    """
    if not cert and not key:
        return None
    if not cert or not key:
        raise BadRequest("--tls-cert and --tls-key go together")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"--tls-cert {cert}, --tls-key {key}: {error}") from None
    return context


def client_context(ca: str) -> ssl.SSLContext | None:
    """Return the context of clients that trust the authorities in `ca` (a PEM file).

    Returns `None`, which means the system trust store, if `ca` is empty. Raises `BadRequest` if the
    file is invalid.
    """
    if not ca:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"{ca}: {error}") from None
