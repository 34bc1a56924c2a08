"""The built-in strategies, one per module, found by the entry points `microserve.strategies`."""
