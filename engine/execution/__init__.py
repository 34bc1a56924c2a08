"""Execution: steps of the engine, computed by the model and driven by a thread.

May import `engine.sampling` and below. Imports nothing here, so that `engine.execution.stepper`
stays importable without torch.
"""
