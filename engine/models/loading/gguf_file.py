"""A reader of GGUF files: metadata, and tensors dequantized one at a time.

The `gguf` library dequantizes the tensors. Its own reader is not used: it takes 2 s for SmolLM2's
vocabulary (this one 0.1 s), more than half of the loading time, and raises arbitrary numpy errors
for damaged files.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.models.errors import CorruptModel, MissingFile, UnsupportedDtype
from engine.models.loading.fields import Fields

__all__ = ["GGUFFile"]

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the file; `shape` is in torch's order, rows first."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    row_bytes: int


class GGUFFile:
    """One memory-mapped GGUF file (version 2 or 3, little endian).

    Raises: `MissingFile` if the file does not exist; `CorruptModel` if it is not a GGUF file,
    truncated, or visibly damaged (GGUF has no checksums).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private, writable mapping, because numpy and torch wrap writable memory only.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            raise MissingFile(f"the file {path} does not exist") from error
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CorruptModel(f"{path} cannot be read: {error}") from error
        try:
            self._read_header()
        except (CorruptModel, UnicodeDecodeError) as error:
            raise CorruptModel(f"{path} is not a valid GGUF file: {error}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by its name in the file."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor, dequantized to float32.

        Raises: `UnsupportedDtype` if the `gguf` library cannot dequantize its type.
        """
        stored = self._tensors[name]
        rows = math.prod(stored.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, rows * stored.row_bytes, stored.offset)
        try:
            with np.errstate(all="ignore"):  # damaged scales overflow; `assemble` checks for that
                values = dequantize(raw.reshape(rows, stored.row_bytes), stored.kind)
        except NotImplementedError as error:
            raise UnsupportedDtype(
                f"{self.path}: {name} is stored as {stored.kind.name}, which cannot be dequantized"
            ) from error
        return torch.from_numpy(values.astype(np.float32, copy=False)).reshape(stored.shape)

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        if cursor.take(4) != b"GGUF":
            raise CorruptModel("it does not begin with GGUF")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CorruptModel(f"its version is {version}; 2 and 3 (little endian) can be read")
        tensors, pairs = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(pairs):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        self.metadata = Fields(metadata, str(self.path))
        infos = [_tensor_info(cursor) for _ in range(tensors)]
        alignment = self.metadata.integer("general.alignment", 32)
        if alignment < 1:
            raise CorruptModel(f"its alignment is {alignment}")
        start = -(-cursor.position // alignment) * alignment
        self._tensors = {
            name: self._place(name, dims, kind, start + offset)
            for name, dims, kind, offset in infos
        }

    def _place(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> _Stored:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise CorruptModel(f"tensor {name} is of an unknown type, {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[known]
        if dims[-1] % block:
            raise CorruptModel(f"tensor {name}'s rows are not whole {known.name} blocks")
        row_bytes = dims[-1] // block * block_bytes
        end = offset + math.prod(dims[:-1]) * row_bytes
        if end > len(self._data):
            raise CorruptModel(
                f"it is truncated: tensor {name} ends at byte {end} of {len(self._data)}"
            )
        return _Stored(known, dims, offset, row_bytes)


class _Cursor:
    """Reads values from the front of the file. Raises: `CorruptModel` where it ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise CorruptModel("it is truncated: it ends within its header")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value: a scalar, a string, or a list of either."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CorruptModel(f"a metadata value is of an unknown type, {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return [self.string() for _ in range(count)]
        if item not in _SCALARS:
            raise CorruptModel(f"a metadata list holds values of type {item}")
        size = struct.calcsize("<" + _SCALARS[item])
        return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.take(size * count)))


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read name, shape (rows first), type and offset. The file stores the innermost size first."""
    name = cursor.string()
    count = cursor.scalar("I")
    if not 1 <= count <= 4:
        raise CorruptModel(f"tensor {name} has {count} dimensions")
    dims = tuple(cursor.scalar("Q") for _ in range(count))
    return name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")
