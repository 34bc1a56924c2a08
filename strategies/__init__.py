"""The built-in strategies, one a module; found by the entry points of `microserve.strategies`."""
