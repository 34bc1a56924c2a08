"""Sampling: tokens from logits.

May import `engine.scheduling` and below. Imports nothing here, so that `engine.sampling.sampled`
stays importable without torch.
"""
