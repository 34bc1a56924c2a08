"""A prefix in bodies of the admin API: text or token ids."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.api.http import off_loop
from router.api.parts import Router

__all__ = ["Prefix", "prefix_tokens"]

Prefix = str | Annotated[list[int], Field(max_length=2**20)]


async def prefix_tokens(router: Router, prefix: str | list[int]) -> list[int]:
    """Return the token ids. Raises `BadRequest` for none, and for ids outside the vocabulary."""
    model = router.registry.model
    if isinstance(prefix, str):
        prefix = await off_loop(len(prefix), model.encode, prefix)
    model.check(prefix, param="prefix")
    return prefix
