"""What the lead tells a worker when it starts it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Worker `rank` of `tp * pp`, stage by stage. The fields with a default are set for each."""

    model: str
    dtype: str
    device: str
    quantization: str
    tp: int
    pp: int
    decodes: bool  # whether the last stage has fewer layers: see `split_model`
    threads: int  # of all workers, 0: one for each of `cpus`; then of this one
    cpus: tuple[int, ...]  # cores to run on
    page_size: int
    device_pages: int  # of each worker's own memory, from which pages are swapped; 0: none
    hidden: int  # width of a row
    logits_rows: int  # that fit the memory for logits
    rank: int = 0
    rendezvous: str = ""  # a file in which the stages find each other
    logits_fd: int = -1  # of the memory for logits, float32 [rows, vocab]
    sum_fd: int = -1  # of the memory for sums of its stage; -1: it has one worker

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        fields = json.loads(text)
        return cls(**{**fields, "cpus": tuple(fields["cpus"])})

    @property
    def stage(self) -> int:
        """Which stage of the pipeline this worker belongs to."""
        return self.rank // self.tp

    @property
    def name(self) -> str:
        """How messages call the worker."""
        part = f"part {self.rank % self.tp} of {self.tp}"
        return f"worker {self.rank} (stage {self.stage} of {self.pp}, {part})"
