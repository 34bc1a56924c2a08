"""A prefix in bodies of the admin API: text or token ids."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from router.api.http import off_loop
from router.api.parts import Router

__all__ = ["Prefix", "prefix_tokens"]

MOST_TOKENS = 1 << 20
KINDS = {
    str: "text", bool: "a boolean", float: "no integer of 64 bits", list: "a list",
    dict: "an object", type(None): "null",
}  # fmt: skip


def _check(value: object) -> object:
    """Check a prefix up to its first mistake: pydantic would describe each element that is wrong.

    Raises `PydanticCustomError`, which names the element.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("prefix", "want text, or a list of token ids")
    if len(value) > MOST_TOKENS:
        raise PydanticCustomError("prefix", f"{len(value)} token ids are more than {MOST_TOKENS}")
    for number, token in enumerate(value):
        if type(token) is not int:
            what = f"element {number} is {KINDS[type(token)]}, not a token id"
            raise PydanticCustomError("prefix", what)
    return value


Prefix = Annotated[
    str | Annotated[list[int], Field(max_length=MOST_TOKENS)], BeforeValidator(_check)
]


async def prefix_tokens(router: Router, prefix: str | list[int]) -> list[int]:
    """Return the token ids. Raises `BadRequest` for none, and for ids outside the vocabulary."""
    model = router.registry.model
    if isinstance(prefix, str):
        prefix = await off_loop(len(prefix), model.encode, prefix)
    model.check(prefix, param="prefix")
    return prefix
