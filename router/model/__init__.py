"""The served model without weights: tokenizer, chat template, limits. Imports `base`."""

from router.model.files import ModelFiles, read_model_files
from router.model.served import ServedModel

__all__ = ["ModelFiles", "ServedModel", "read_model_files"]
