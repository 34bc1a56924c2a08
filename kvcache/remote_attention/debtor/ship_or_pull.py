"""Whether to send queries to remote KV, or to fetch the KV (Infinite-LLM, section 4.6)."""

from __future__ import annotations

from kvcache.errors import BadRequest

__all__ = ["pulled_bytes", "ship_queries", "shipped_bytes"]


def shipped_bytes(
    rows: int, *, heads: int, head_dim: int, element_bytes: int, parts: int = 1
) -> int:
    """Return the bytes that travel in one layer if `rows` queries go to the KV.

    Each row sends a query and gets `parts` results: `o` in elements of `element_bytes`, `m` and `l`
    in float32. With one part that is `rows·(2·heads·head_dim·element_bytes + 8·heads)`. A holder
    returns one part per node of the block tree (`kvcache.attention.distributed`). Raises
    `BadRequest` for a count that is negative, or a shape that is not positive.
    """
    _check(rows, parts, shape=(heads, head_dim, element_bytes))
    vector = heads * head_dim * element_bytes
    return rows * (vector + parts * (vector + 8 * heads))


def pulled_bytes(tokens: int, *, kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Return the bytes that travel in one layer if the KV of `tokens` remote tokens is fetched.

    That is `2·tokens·kv_heads·head_dim·element_bytes`. Raises `BadRequest` as `shipped_bytes` does.
    """
    _check(tokens, shape=(kv_heads, head_dim, element_bytes))
    return 2 * tokens * kv_heads * head_dim * element_bytes


def ship_queries(
    rows: int,
    tokens: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: int,
    parts: int = 1,
) -> bool:
    """Return whether sending `rows` queries moves fewer bytes than fetching `tokens` tokens' KV.

    The inequality is `L_q·(2·H·d·b + 8·H) < 2·n·H_kv·d·b` for L_q rows, n tokens, and one part. It
    is about traffic only: neither about the holder's time, nor about KV that is fetched once and
    used in many steps. Raises `BadRequest` as `shipped_bytes` does.
    """
    shipped = shipped_bytes(
        rows, heads=heads, head_dim=head_dim, element_bytes=element_bytes, parts=parts
    )
    return shipped < pulled_bytes(
        tokens, kv_heads=kv_heads, head_dim=head_dim, element_bytes=element_bytes
    )


def _check(*counts: int, shape: tuple[int, ...]) -> None:
    if min(counts) < 0:
        raise BadRequest(f"negative counts: {counts}")
    if min(shape) < 1:
        raise BadRequest(f"a shape that is not positive: {shape}")
