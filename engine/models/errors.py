"""Exceptions for models that cannot be served; messages address the engine's operator.

ModelError
├── UnknownModel             no such alias, folder, file or hub id
├── DownloadFailed           the files could not be downloaded or stored
├── MissingFile              a model folder lacks a required file
├── CorruptModel             truncated, unreadable, or contradicting itself
├── UnsupportedArchitecture  a valid model whose architecture or settings are not implemented
├── UnsupportedTokenizer     a valid tokenizer of a kind that is not implemented
└── UnsupportedDtype         a dtype that cannot be computed in or read
"""

from __future__ import annotations

__all__ = [
    "CorruptModel",
    "DownloadFailed",
    "MissingFile",
    "ModelError",
    "UnknownModel",
    "UnsupportedArchitecture",
    "UnsupportedDtype",
    "UnsupportedTokenizer",
]


class ModelError(Exception):
    """Base of all errors of this package; the message can be shown to users as it is."""


class UnknownModel(ModelError):
    """No alias, folder, file or hub id has this name."""


class DownloadFailed(ModelError):
    """The network, the index or the cache folder failed; the message says what to do."""


class MissingFile(ModelError):
    """A model folder lacks a required file."""


class CorruptModel(ModelError):
    """The files are damaged or contradict each other."""


class UnsupportedArchitecture(ModelError):
    """The model is valid, but its architecture is not implemented."""


class UnsupportedTokenizer(ModelError):
    """The tokenizer is valid, but its kind is not implemented."""


class UnsupportedDtype(ModelError):
    """A dtype that cannot be computed in or read."""
