"""The served model without weights: tokenizer, chat template, limits. Imports `base`."""
