"""The tree of reasons why a model cannot be served, each with a message for whoever started it.

ModelError
├── UnknownModel             no such alias, folder, file or hub id
├── DownloadFailed           the files could not be fetched or kept
├── MissingFile              a folder lacks a file that it needs
├── CorruptModel             truncated, garbage, or at odds with itself
├── UnsupportedArchitecture  a sound model of a kind, or with a setting, that is not built here
├── UnsupportedTokenizer     a sound tokenizer of a kind that is not built here
└── UnsupportedDtype         a dtype to compute in, or one that the weights are stored in
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
    """Base of all errors of this package; its text is fit to be shown as it is."""


class UnknownModel(ModelError):
    """The name means nothing here."""


class DownloadFailed(ModelError):
    """The network, the index or the cache folder failed us; the text says what to do."""


class MissingFile(ModelError):
    """A model folder lacks a file."""


class CorruptModel(ModelError):
    """The files are damaged or contradict each other."""


class UnsupportedArchitecture(ModelError):
    """Nothing is wrong with the model, but its architecture is not among those built here."""


class UnsupportedTokenizer(ModelError):
    """Nothing is wrong with the tokenizer, but its kind is not among those built here."""


class UnsupportedDtype(ModelError):
    """Not a dtype that can be computed in, or read."""
