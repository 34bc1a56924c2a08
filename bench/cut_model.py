"""A smaller model for slow machines: the first layers of SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.models.loading.gguf_checkpoint import open_gguf
from engine.models.loading.locate import locate
from engine.models.model_folder import write_folder

__all__ = ["cut_smollm2"]


@contextmanager
def cut_smollm2(layers: int) -> Iterator[str]:
    """Yield a folder with SmolLM2's first layers, or the model's name if all are wanted (0)."""
    if not layers:
        yield "smollm2"
        return
    source = locate("smollm2")
    whole = open_gguf(source.path, source.sha256)
    behind = tuple(f"model.layers.{layer}." for layer in range(layers, whole.config.num_layers))
    shapes = {name: shape for name, shape in whole.shapes.items() if not name.startswith(behind)}
    config = replace(whole.config, num_layers=min(layers, whole.config.num_layers))
    with TemporaryDirectory(prefix="microserve-bench-") as folder:
        write_folder(replace(whole, config=config, shapes=shapes), Path(folder))
        yield folder
