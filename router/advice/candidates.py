"""What is compared: strategies with parameters, and roles of the engines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.protocol import BadRequest
from router.engines import Role
from router.rollout import Catalog
from router.strategy import Bound

__all__ = ["Asked", "Candidate", "candidates", "splits"]

Roles = Mapping[str, Role]  # by engine id

# Values that are tried of the built-in strategies' parameters.
GRID: dict[str, tuple[dict[str, Any], ...]] = {
    "data_parallel": ({},),
    "cache_aware": ({"load_weight": 0.25}, {"load_weight": 0.5}, {"load_weight": 1.0}),
    "prefill_decode": ({},),
    "balanced": ({"ratio": 0.1}, {"ratio": 0.3}, {"ratio": "auto"}),
    "migrate": ({"overload": 512}, {"overload": 2048}),
    "replicate": ({},),
}
# These do not look at roles, so roles need not be tried.
ROLELESS = frozenset({"data_parallel", "cache_aware", "migrate", "replicate"})
MOST = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """A strategy that is asked for, with parameters: of the catalog, or in a `source`."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A strategy with its parameters, as JSON values, and the roles of the engines under it."""

    name: str
    params: Mapping[str, Any]
    roles: Roles
    changes_roles: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)  # parameters that are not the default
    source: str = field(default="", repr=False)  # empty: it is installed
    file: str = ""  # of the source
    digest: str = field(default="", compare=False)  # SHA-256 of its module's source
    version: str = ""  # in words, if another one of the same name is compared

    @property
    def title(self) -> str:
        """What people call it."""
        params = ",".join(f"{name}={value}" for name, value in self.own.items())
        text = f"{self.name}:{params}" if params else self.name
        text += f" [{self.version}]" if self.version else ""
        if not self.changes_roles:
            return text
        kinds = list(self.roles.values())
        prefill, decode = kinds.count("prefill"), kinds.count("decode")
        shape = f"{prefill}P{decode}D" if prefill or decode else "any roles"
        return f"{text} ({shape})"


def candidates(
    catalog: Catalog,
    current: Bound,
    roles: Roles,
    asked: Sequence[Asked] | None,
    *,
    keep_roles: bool = False,
) -> list[Candidate]:
    """Return what to compare for engines with these roles; the first one is what runs now.

    Without `asked`, all strategies of the catalog are taken, with `GRID`'s parameters or their
    defaults. Unless with `keep_roles`, strategies that may look at roles are tried with the present
    ones, with none, and with `splits`. Raises `BadRequest` for parameters that a strategy
    has not, and for more than `MOST` candidates; `NotFound` for an unknown strategy.
    """
    if asked is None:
        names = [one["name"] for one in catalog.describe()]
        asked = [Asked(name, params) for name in names for params in GRID.get(name, ({},))]
    found = [_of_bound(catalog, current, roles)]
    for one in asked:
        candidate = _of_source(one, roles)
        if candidate is None:
            candidate = _of_bound(catalog, catalog[one.name].bind(one.params), roles)
        if candidate.name == found[0].name and candidate.source != found[0].source:
            version = "given source" if one.source is not None else "loaded later"
            candidate = replace(candidate, version=version)
        own_splits = not keep_roles and one.name not in ROLELESS
        for split in splits(roles) if own_splits else [roles]:
            tried = replace(candidate, roles=split, changes_roles=split != roles)
            if tried not in found:
                found.append(tried)
    if len(found) > MOST:
        raise BadRequest(f"{len(found)} candidates are more than {MOST}", param="candidates")
    return found


def _of_bound(catalog: Catalog, bound: Bound, roles: Roles) -> Candidate:
    source, file = catalog.source_of(bound.strategy)
    return Candidate(
        bound.strategy.name, bound.shown, roles, own=_own(bound), source=source, file=file,
        digest=bound.strategy.source_sha256,
    )  # fmt: skip


def _of_source(asked: Asked, roles: Roles) -> Candidate | None:
    """Return the candidate of a source that is not loaded; its own process checks it."""
    if asked.source is None:
        return None
    params, digest = dict(asked.params), hashlib.sha256(asked.source.encode()).hexdigest()
    return Candidate(asked.name, params, roles, own=params, source=asked.source, digest=digest)


def _own(bound: Bound) -> dict[str, Any]:
    """Return the parameters that are not the strategy's defaults."""
    defaults = bound.strategy.bind({}).shown
    return {name: value for name, value in bound.shown.items() if value != defaults[name]}


def splits(roles: Roles) -> list[Roles]:
    """Return the present roles, no roles, and divisions into engines that prefill and that decode.

    With many engines, only divisions near quarters are among them. Engines prefill in the order of
    `roles`, except that those with a role keep it where the numbers permit.
    """
    count = len(roles)
    order = sorted(roles, key=lambda name: ("prefill", "any", "decode").index(roles[name]))
    sizes = {1, count // 4, count // 2, 3 * count // 4, count - 1} if count > 4 else range(1, count)
    found: list[Roles] = [roles, dict.fromkeys(roles, "any")]
    for size in sorted(sizes):
        if not 0 < size < count:
            continue
        prefills = frozenset(order[:size])
        split: Roles = {name: "prefill" if name in prefills else "decode" for name in roles}
        found.append(split)
    return [each for number, each in enumerate(found) if each not in found[:number]]
