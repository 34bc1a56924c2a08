"""Attention in 16 bits on GPUs by FlashInfer: plans of a step, and plans for CUDA graphs.

May import `attention` and the rooms below it, but not what imports this room.
"""
