"""The memory of vLLM's KV cache: its layout, and its place in a region that peers can write."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from kvcache.errors import BadRequest, Internal
from kvcache.memory import BlockLayout, Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Placement", "block_layout", "fingerprint", "layer_indices", "layout_of"]


def layout_of(config: KVCacheConfig) -> BlockLayout:
    """Return the layout of vLLM's one buffer of blocks.

    Raises `BadRequest` for models whose layers differ in what they cache: sliding windows, linear
    attention, latent attention.
    """
    groups = config.kv_cache_groups
    specs = {type(group.kv_cache_spec).__name__ for group in groups}
    if len(groups) != 1 or specs != {"FullAttentionSpec"}:
        raise BadRequest(
            f"the layers cache {', '.join(sorted(specs))}; KV moves between engines only if all "
            "cache full attention"
        )
    return block_layout(config.num_blocks, groups[0].kv_cache_spec, config.kv_cache_tensors)


def block_layout(blocks: int, spec: Any, tensors: Any) -> BlockLayout:
    """Return the layout of tensors that together hold every layer of every block once.

    Raises `BadRequest` if they lie in another way than layer behind layer or block behind block.
    """
    if spec.sliding_window is not None:
        raise BadRequest("KV of sliding windows does not move between engines")
    layers = sum(len(tensor.layers) for tensor in tensors)
    found = sorted(
        (tensor.offset + place * tensor.layer_stride, tensor.block_stride, tensor.size)
        for tensor in tensors
        for place in range(len(tensor.layers))
    )
    for by_block in (True, False):
        layout = BlockLayout(
            layers, blocks, int(spec.block_size), int(spec.page_size_bytes), by_block
        )
        if found == [
            (layer * layout.layer_stride, layout.block_stride, layout.nbytes)
            for layer in range(layers)
        ]:
            return layout
    raise BadRequest("vLLM places its blocks in a way that is not known here")


def layer_indices(config: KVCacheConfig) -> dict[str, int]:
    """Return each layer's place in a block, by the layer's name."""
    ordered = sorted(config.kv_cache_tensors, key=lambda tensor: tensor.offset)
    names = [name for tensor in ordered for name in tensor.layers]
    return {name: index for index, name in enumerate(names)}


def fingerprint(layout: BlockLayout, config: VllmConfig, spec: Any, weights: str) -> str:
    """Return a digest, equal on two engines if and only if they can use each other's blocks.

    The order of bytes within a block depends on vLLM's version, the attention kernel and, on CPUs,
    the instruction set that the kernel uses.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    parts = (
        "vllm-blocks", __version__, current_platform.device_type, _processor(), layout.layers,
        layout.page_size, layout.layer_bytes, spec.num_kv_heads, spec.head_size, spec.dtype,
        config.cache_config.cache_dtype, config.cache_config.get_resolved_kv_cache_layout(),
        config.model_config.dtype, weights,
    )  # fmt: skip
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def _processor() -> str:
    """Return what decides which kernels vLLM's attention uses on a CPU: its flags, in order."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return line.partition(":")[2].strip()
    return platform.machine()


class Placement(TorchFunctionMode):
    """While entered, vLLM's allocation of its KV cache gets the memory of a region.

    vLLM enters it around this allocation alone (`get_mem_pool_context`).
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._placed = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        wanted = self._region.layout.nbytes
        if function is torch.zeros and args == (wanted,) and kwargs.get("dtype") is torch.int8:
            self._placed = True
            return self._region.pool
        return function(*args, **kwargs)

    def check(self, layers: Mapping[str, torch.Tensor], indices: Mapping[str, int]) -> None:
        """Check that every layer is where the layout says. Raises `Internal`."""
        layout, start = self._region.layout, self._region.pool.data_ptr()
        if not self._placed or not isinstance(layout, BlockLayout):
            raise Internal("vLLM has allocated its KV cache in another way than is known here")
        for name, tensor in layers.items():
            expected = start + indices[name] * layout.layer_stride
            if tensor.data_ptr() != expected:
                raise Internal(f"vLLM has placed {name} elsewhere than its configuration says")
