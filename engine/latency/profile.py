"""Profiles: an engine's latency and memory, as a JSON file.

The profiles of this folder have names such as `opt-66b@a100:tp4`: model, device and, with more than
one device, how they divide the model. Each says in `source` where its numbers are from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import orjson
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from engine.latency.fit import Fit
from engine.latency.put import PutLatency
from engine.latency.scatter import Scatter
from engine.latency.step import STRICT, FittedLatency, FixedLatency
from engine.latency.table import TableLatency
from engine.protocol import BadRequest, bad_request

__all__ = [
    "AnyLatency",
    "Profile",
    "find_profile",
    "profile_fields",
    "profile_names",
    "read_profile",
    "read_profile_fields",
    "write_profile",
]

VERSION: Final = 1
MOST_BYTES = 1 << 24  # of a file
SHIPPED = Path(__file__).with_name("profiles")

AnyLatency = FittedLatency | FixedLatency | TableLatency
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]  # as engines say them of their model
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, config=STRICT)
class Profile:
    """One engine: a model on a device or several."""

    name: Text
    model: Text
    device: Text
    gpus: Annotated[int, Field(ge=0)]  # 0: it runs on a CPU
    source: Text  # where the numbers are from
    layers: Count
    kv_bytes_per_token: Positive  # in all layers
    context_length: Count  # tokens of prompt and output, at most
    pool_tokens: Positive  # tokens whose KV the pool holds
    step: Annotated[AnyLatency, Field(discriminator="kind")]
    put: PutLatency
    fit: Fit | None = None  # None: the source does not publish the points
    scatter: Scatter = ()


_PROFILE = TypeAdapter(Profile)


def read_profile(path: Path | str) -> Profile:
    """Read a profile. Raises `BadRequest` with one sentence if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise BadRequest(f"{path}: a profile has {MOST_BYTES} bytes at most", param="profile")
        fields = orjson.loads(data)
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}", param="profile") from None
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{path}: not JSON: {error}", param="profile") from None
    return read_profile_fields(fields, str(path))


def read_profile_fields(fields: Any, where: str) -> Profile:
    """Read a profile from the JSON object of its file; `where` names it in errors.

    Raises `BadRequest` with one sentence if that is no profile.
    """
    if not isinstance(fields, dict) or "version" not in fields:
        raise BadRequest(f"{where}: not a profile: it has no version", param="profile")
    version = fields["version"]
    if type(version) is not int or version != VERSION:
        raise BadRequest(
            f"{where}: version {orjson.dumps(version).decode()} of a profile, where this "
            f"microserve reads version {VERSION}",
            param="profile",
        )
    rest = {name: value for name, value in fields.items() if name != "version"}
    try:
        return _PROFILE.validate_json(orjson.dumps(rest))
    except ValidationError as invalid:
        problem = bad_request(invalid)
        raise BadRequest(f"{where}: {problem.message}", param=problem.param) from None


def profile_fields(profile: Profile) -> dict[str, Any]:
    """Return the JSON object of a profile's file."""
    return {"version": VERSION, **_PROFILE.dump_python(profile, mode="json")}


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile as JSON, a line a field. Raises `BadRequest` if it cannot be written."""
    lines = [
        b"  %b: %b" % (orjson.dumps(key), orjson.dumps(value))
        for key, value in profile_fields(profile).items()
    ]
    try:
        Path(path).write_bytes(b"{\n%b\n}\n" % b",\n".join(lines))
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}", param="profile") from None


def profile_names() -> list[str]:
    """Return the names of the shipped profiles, sorted."""
    return sorted(path.stem.replace("_", ":") for path in SHIPPED.glob("*.json"))


def find_profile(name: str) -> Profile:
    """Return a shipped profile by its name, or the profile of a path that ends in `.json`.

    Raises: `BadRequest` for an unknown name, with the names that there are, and for a bad file.
    """
    if name.endswith(".json"):
        return read_profile(name)
    known = profile_names()
    if name not in known:
        raise BadRequest(
            f"no profile is called {name!r}; there are {', '.join(known)}, and paths of .json "
            "files",
            param="profile",
        )
    return read_profile(SHIPPED / f"{name.replace(':', '_')}.json")
