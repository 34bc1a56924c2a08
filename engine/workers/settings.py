"""What the lead tells a worker when it starts it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Worker `rank` of `tp * pp`, stage by stage."""

    model: str
    dtype: str
    device: str
    quantization: str
    tp: int
    pp: int
    rank: int
    threads: int
    cpus: tuple[int, ...]  # cores to run on
    rendezvous: str  # a file in which the workers find each other
    page_size: int
    logits_rows: int  # that fit the memory for logits
    logits_fd: int  # of that memory, float32 [rows, vocab]
    sum_fd: int  # of the memory for sums of this stage; -1: it has one worker
    hidden: int  # width of a row

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
