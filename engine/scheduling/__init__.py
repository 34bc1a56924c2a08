"""Scheduling: chooses the jobs, and their tokens, that the next step computes.

May import `engine.protocol` and the torch-free parts of `kvcache`. Imports no torch, starts no
thread and reads no wall clock.
"""

from engine.scheduling.chunk import Chunk
from engine.scheduling.from_calls import generation_of, reserve_send
from engine.scheduling.jobs import Generation, Job, KVMirror, Send, queued_tokens
from engine.scheduling.long_generations import ShipLimits
from engine.scheduling.parallel_sampling import ParallelSampling
from engine.scheduling.scheduler import Scheduler

__all__ = [
    "Chunk",
    "Generation",
    "Job",
    "KVMirror",
    "ParallelSampling",
    "Scheduler",
    "Send",
    "ShipLimits",
    "generation_of",
    "queued_tokens",
    "reserve_send",
]
