"""TLS contexts, made of files of certificates."""

from __future__ import annotations

import ssl

from engine.protocol import BadRequest

__all__ = ["client_context", "server_context"]


def server_context(cert: str, key: str) -> ssl.SSLContext | None:
    """For a server with the certificate chain in `cert` and its key in `key` (PEM files); `None`
    without either. Raises `BadRequest` if they cannot be used."""
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
    """For clients of servers whose certificates are signed by those in `ca` (a PEM file); `None`:
    by the usual authorities. Raises `BadRequest` if it cannot be used."""
    if not ca:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"{ca}: {error}") from None
