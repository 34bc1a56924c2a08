"""The served model without weights: tokenizer, chat template, limits. Imports `base`."""

from router.model.served import ServedModel

__all__ = ["ServedModel"]
