"""What an engine can do: engines differ, and routers and strategies respect it.

`start_generate`, `release`, `model`, `state` and `/health` are not listed: every engine has them.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ALL_CAPABILITIES", "Capability"]

Capability = Literal[
    "prep_recv",  # receives KV of peers into leases
    "remote_send",  # puts KV of cached and computed prompts into peers
    "commit",  # publishes a landed lease to its prefix cache
    "pin",  # protects cached prefixes from eviction
    "mirror",  # mirrors a running generation's KV, and makes room for mirrors: reserve, extend
    "prefixes",  # reports the pages that its prefix cache holds, as they change
    "statistics",  # reports how long its steps and puts took
    "fork",  # further choices of a prompt share its KV, including the last page
    "resume",  # continues sampled and penalised outputs of other engines with the same tokens
]
ALL_CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
