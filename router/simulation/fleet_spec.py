"""Which engines a simulation has: `4xllama-3.1-8b@a100`, their roles, and flags that all share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.latency import Profile, find_profile
from engine.protocol import BadRequest, EngineConfig
from engine.virtual import EngineKind
from router.engines import Role

__all__ = ["ENGINE_FLAGS", "SimulatedEngine", "read_fleet"]

# Flags of an engine that mean something to a virtual one. All engines of a fleet have the same.
ENGINE_FLAGS = (
    "token_budget", "max_batch", "max_waiting", "decode_slowdown", "pool_pages", "page_size",
    "max_model_len", "lease_ms", "borrow", "lend_share",
)  # fmt: skip
MOST_ENGINES = 1024
MOST_PAGES = 1 << 26  # of all pools: some 3 GB of bookkeeping
_PART = re.compile(r"(?:([0-9]{1,9})x)?(\S+)")


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine of a fleet. Its id is in `config`."""

    config: EngineConfig
    profile: Profile
    kind: EngineKind = field(default_factory=EngineKind)


def read_fleet(
    spec: str, *, prefill: int = 0, decode: int = 0, flags: Mapping[str, Any] | None = None
) -> tuple[SimulatedEngine, ...]:
    """Return the engines of a fleet such as `2xopt-13b@a100,opt-13b@a100:tp2`.

    Each part is `[N x]PROFILE`, with a profile's name or path as `find_profile` takes it. The first
    `prefill` engines get that role, the next `decode` ones the other, and the rest any. Their ids
    are `prefill-0`, `decode-0` or `engine-0`, and so on. `flags` are values of `ENGINE_FLAGS`.

    Raises `BadRequest` for a spec or profile that cannot be read, for more roles than engines, for
    several models, and for a pool without a page.
    """
    profiles = [profile for part in spec.split(",") for profile in _part(part.strip(), spec)]
    if len(profiles) > MOST_ENGINES:
        raise BadRequest(f"a fleet has {MOST_ENGINES} engines at most, not {len(profiles)}")
    if prefill + decode > len(profiles):
        raise BadRequest(
            f"{prefill} engines for prefill and {decode} for decode are more than the "
            f"{len(profiles)} of the fleet {spec}"
        )
    if len(models := {profile.model: None for profile in profiles}) > 1:
        raise BadRequest(f"the engines of a fleet serve one model, not {' and '.join(models)}")
    if (prefill > 0) != (decode > 0) and prefill + decode == len(profiles):
        raise BadRequest("a fleet with only one of the roles prefill and decode has no use for it")
    roles: list[Role] = ["prefill" for _ in range(prefill)]
    roles += ["decode" for _ in range(decode)]
    roles += ["any" for _ in profiles[len(roles) :]]
    numbers: Counter[Role] = Counter()
    fleet, all_pages = [], 0
    for role, profile in zip(roles, profiles, strict=True):
        name = f"{'engine' if role == 'any' else role}-{numbers[role]}"
        numbers[role] += 1
        config = EngineConfig(**{**(flags or {}), "engine_id": name, "role": role})
        pages = config.pool_pages or profile.pool_tokens // config.page_size
        all_pages += pages
        if pages < 1:
            raise BadRequest(
                f"the pool of {profile.name}, {profile.pool_tokens} tokens, has no room for a page "
                f"of {config.page_size}"
            )
        fleet.append(SimulatedEngine(config, profile))
    if all_pages > MOST_PAGES:
        raise BadRequest(f"a fleet has {MOST_PAGES} pages at most, not {all_pages}")
    return tuple(fleet)


def _part(part: str, spec: str) -> list[Profile]:
    match = _PART.fullmatch(part)
    count = int(match[1] or 1) if match is not None else 0
    if match is None or count < 1:
        raise BadRequest(
            f"{spec!r} is no fleet: want NxPROFILE, or several with commas, such as "
            "4xllama-3.1-8b@a100"
        )
    if count > MOST_ENGINES:
        raise BadRequest(f"a fleet has {MOST_ENGINES} engines at most, not {count}")
    return [find_profile(match[2])] * count
