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


def client_context(ca: str, cert: str = "", key: str = "") -> ssl.SSLContext | None:
    """Return the context of clients that trust the authorities in `ca` (a PEM file).

    They show the certificate chain `cert`, whose private key is `key`, to servers that ask for it.
    Returns `None`, which means the system trust store and no certificate, if nothing is given.
    Raises `BadRequest` if a file is invalid, or only one of `cert` and `key` is given.
    """
    if not ca and not cert and not key:
        return None
    if bool(cert) != bool(key):
        raise BadRequest("--engine-cert and --engine-cert-key go together")
    file = ca
    try:
        context = ssl.create_default_context(cafile=ca or None)
        file = cert
        if cert:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"{file}: {error}") from None
    return context
