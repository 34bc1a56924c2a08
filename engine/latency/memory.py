"""How many tokens of KV fit beside the weights: the pool of an engine on some device.

A share of each device's memory is usable. Each device holds the embeddings, and its part of the
layers' matrices and of the KV. Biases, norms and activations are within the share that is not used.
This model gives DistServe's published table of pool sizes to a page or 0.01 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import BadRequest

__all__ = ["DEVICES", "MODELS", "Device", "ModelShape", "pool_tokens"]

GIB = 1 << 30
USABLE = 0.93  # of a device's memory


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its memory. Sizes of matrices are in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # width of the feed-forward part
    matrices: int  # of hidden x inner in a layer: 2, or 3 with a gate
    embeddings: int  # rows of all embeddings, of positions too, and of an output matrix of its own
    context_length: int
    element_bytes: int = 2

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.element_bytes * (attention + self.matrices * self.hidden * self.inner)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of all embeddings."""
        return self.element_bytes * self.embeddings * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return self.layers * self.layer_bytes + self.embedding_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """A device's memory in bytes, and how fast it reads it, in bytes/s."""

    memory: int
    bandwidth: float


def _opt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=4 * hidden,
        matrices=2,
        embeddings=50272 + 2050,  # tokens and positions
        context_length=2048,
    )


# From the models' published configurations.
MODELS = {
    "opt-13b": _opt(40, 5120, 40),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 3, 2 * 128256, 131072),
    "llama2-13b": ModelShape(40, 5120, 40, 40, 128, 13824, 3, 2 * 32000, 4096),
    "llama2-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 3, 2 * 32000, 4096),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25600, 3, 2 * 151936, 40960),
    # 128 experts in each layer, each with three matrices of its own.
    "qwen3-30b-a3b": ModelShape(48, 2048, 32, 4, 128, 768, 3 * 128, 2 * 151936, 262144),
    "bloom-176b": ModelShape(70, 14336, 112, 112, 128, 57344, 2, 250880, 2048),
}
# From the vendor's data sheets.
DEVICES = {
    "a100": Device(80 * GIB, 2.039e12),
    "a100-40g": Device(40 * GIB, 1.555e12),
    "h100": Device(80 * GIB, 3.35e12),
    "rtx4090": Device(24 * GIB, 1.008e12),
    "rtx-pro-6000": Device(96 * GIB, 1.792e12),
}


def pool_tokens(
    model: ModelShape,
    device: Device,
    *,
    tp: int = 1,
    pp: int = 1,
    page_size: int = 16,
    usable: float = USABLE,
) -> int:
    """Return the tokens of KV that fit, in whole pages, on `tp`·`pp` devices.

    Raises: `BadRequest` if layers or heads cannot be divided so, and if not a page fits.
    """
    if tp < 1 or pp < 1 or model.layers % pp or model.heads % tp:
        raise BadRequest(
            f"{model.layers} layers and {model.heads} heads cannot be divided by pp={pp} and "
            f"tp={tp}"
        )
    parts = tp * pp
    weights = model.embedding_bytes + model.layers * model.layer_bytes / parts
    room = device.memory * usable - weights
    page_bytes = page_size * model.kv_bytes_per_token / parts
    pages = int(room // page_bytes)
    if pages < 1:
        raise BadRequest(
            f"the weights take {weights / GIB:.1f} GiB of each device, which leaves no room for "
            f"KV in {usable:.0%} of {device.memory / GIB:.0f} GiB; use more than {parts} devices"
        )
    return pages * page_size
