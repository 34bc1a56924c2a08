"""Parts of a model: what each worker of an engine computes.

An engine may be split over workers, by layers (pipeline stages, Huang et al. 2019) and by heads
(tensor parallel, Shoeybi et al. 2019, §3). A worker has some of the layers, and of these some KV
heads with all query heads that read them, a range of the MLP's inner units, and a range of the
vocabulary. Sums over the workers of a stage restore the rows of the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig
from kvcache.shard import Shard, split

__all__ = ["Part", "split_model", "whole"]


@dataclass(frozen=True, slots=True)
class Part:
    """One worker's part of a model. Ranges are of the whole model's indices."""

    layers: range
    kv_heads: range
    heads: range  # of queries: those that read these KV heads
    inner: range  # units of the MLP
    vocab: range  # rows of the embedding and of the head
    first: bool  # its stage embeds tokens
    last: bool  # its stage computes logits

    @property
    def leads(self) -> bool:
        """Whether what every worker of a stage would add, such as a bias, is added here."""
        return self.kv_heads.start == 0

    @property
    def shard(self) -> Shard:
        """The KV that this worker holds."""
        layers, heads = self.layers, self.kv_heads
        return Shard(layers.start, layers.stop, heads.start, heads.stop)


def whole(config: ModelConfig) -> Part:
    """Return all of a model as one part."""
    return split_model(config, tp=1, pp=1)[0]


def split_model(config: ModelConfig, *, tp: int, pp: int, decodes: bool = True) -> list[Part]:
    """Return the parts of `tp * pp` workers, stage by stage.

    What does not divide evenly is divided unevenly: the first parts get one more. The last stage
    has fewer layers, because decodes read the head too; without `decodes` it has as many, because a
    prompt reads the head for its last token only. Query heads follow their KV heads. Raises
    `BadRequest` for more stages than layers, and for more workers in a stage than KV heads.
    """
    last = _layers_in_head(config) if decodes else 0.0
    shards = split(config.num_layers, config.num_kv_heads, pp=pp, tp=tp, last=last)
    group = config.num_heads // config.num_kv_heads
    return [
        Part(
            layers=range(shard.layer, shard.layer_end),
            kv_heads=range(shard.head, shard.head_end),
            heads=range(shard.head * group, shard.head_end * group),
            inner=_share(config.intermediate_size, number % tp, tp),
            vocab=_share(config.vocab_size, number % tp, tp),
            first=shard.layer == 0,
            last=shard.layer_end == config.num_layers,
        )
        for number, shard in enumerate(shards)
    ]


def _layers_in_head(config: ModelConfig) -> float:
    """Return how many layers have as many weights as the head."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # q, k, v and the output
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.vocab_size * config.hidden_size / layer


def _share(count: int, part: int, parts: int) -> range:
    """Return one of `parts` ranges of `count` units; each begins at a multiple of `UNIT`."""
    units = -(-count // UNIT)
    each, more = divmod(units, parts)
    begin = each * part + min(part, more)
    end = begin + each + (part < more)
    return range(min(begin * UNIT, count), min(end * UNIT, count))


UNIT = 16  # kernels of matrix products prefer multiples of it
