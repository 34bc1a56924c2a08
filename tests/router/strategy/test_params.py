"""The parameters of strategies: types, bounds and descriptions."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from annotated_types import Ge
from pydantic import Field

from engine.protocol import BadRequest
from router.api.rest import reply
from router.base.request import Chunk
from router.strategy.definition import strategy


@strategy
async def tuned(
    request,
    cluster,
    *,
    ratio: Annotated[float, Field(ge=0, le=1, description="a share")] = 0.5,
    mode: Literal["near", "far"] = "near",
    count: Annotated[int, Ge(2)] = 3,
    names: tuple[str, ...] = ("a",),
    zone: str | None = None,
    on: bool = False,
    share: Annotated[float, Field(le=1)] | Literal["auto"] = "auto",
):
    """Help."""
    yield Chunk()


def test_defaults_and_values():
    assert tuned.bind({}).params == {
        "ratio": 0.5, "mode": "near", "count": 3, "names": ("a",), "zone": None, "on": False,
        "share": "auto",
    }  # fmt: skip
    given = {"ratio": 1, "names": ["x", "y"], "zone": "eu", "on": True}
    assert tuned.bind(given).params["names"] == ("x", "y")
    assert tuned.bind(given).shown["names"] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ratio", 1.1, "less than or equal to 1"),
        ("share", "half", "a valid number, or Input should be 'auto'"),
        ("ratio", "0.3", "valid number"),
        ("ratio", float("nan"), "less than or equal to 1"),
        ("mode", "middle", "'near' or 'far'"),
        ("count", 1, "greater than or equal to 2"),
        ("count", 2.5, "integer"),
        ("count", True, "integer"),
        ("names", [1], "string"),
        ("zone", 3, "string"),
        ("on", 1, "boolean"),
        ("other", 1, "there are: ratio, mode, count, names, zone, on"),
        ("ratio", object(), "serialize"),
        ("count", 2**64, "64-bit"),
    ],
)
def test_wrong_values_are_named(name, value, says):
    with pytest.raises(BadRequest, match="strategy tuned: ") as wrong:
        tuned.bind({name: value})
    assert wrong.value.param == f"params.{name}"
    assert name in wrong.value.message
    assert says in wrong.value.message


def test_parameters_are_described_as_json_schema():
    described = tuned.describe()
    assert described["params"]["ratio"] == {
        "type": "number", "minimum": 0, "maximum": 1, "description": "a share", "default": 0.5,
    }  # fmt: skip
    assert described["params"]["mode"]["enum"] == ["near", "far"]
    assert described["params"]["names"]["default"] == ["a"]
    assert len(described["source_sha256"]) == 64


def test_what_is_described_can_be_sent():
    """Half of a surrogate pair can be in a literal of Python, but in no JSON."""

    @strategy
    async def half(request, cluster, *, ratio: float = 0.5):
        "Half \ud800 of it."
        yield Chunk()

    assert reply(half.describe()).status_code == 200
    assert half.doc == "Half ? of it."

    async def help_(request, cluster, *, ratio: Annotated[int, Field(description="\ud800")] = 1):
        yield Chunk()

    async def schema(request, cluster, *, ratio: Annotated[int, Field(le=2**64)] = 1):
        yield Chunk()

    async def default(request, cluster, *, ratio: int = 2**64):
        yield Chunk()

    for function in (help_, schema, default):
        with pytest.raises(TypeError, match=f"{function.__name__}: the .* ratio: "):
            strategy(function)
