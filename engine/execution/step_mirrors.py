"""The mirrors that a stepper advances. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling import Generation, Job, KVMirror

__all__ = ["StepMirrors"]


class StepMirrors:
    """The mirrored generations among a stepper's jobs; used by the step loop's thread only."""

    def __init__(self) -> None:
        self._mirrors: dict[Generation, KVMirror] = {}

    def add(self, generation: Generation) -> None:
        """Add a generation; has no effect if it has no mirror."""
        if generation.mirror is not None:
            self._mirrors[generation] = generation.mirror

    def advance(self, jobs: Iterable[Job]) -> None:
        """Advance the mirrors of jobs that have just computed KV."""
        if not self._mirrors:
            return
        for job in jobs:
            if isinstance(job, Generation) and job in self._mirrors:
                self._mirrors[job].advance(job.seq_id)

    def renew(self) -> None:
        """Keep the leases of all mirrors alive, including those of waiting generations."""
        for generation, mirror in list(self._mirrors.items()):
            if mirror.over:
                del self._mirrors[generation]
            else:
                mirror.renew()

    def end(self, generation: Generation) -> None:
        """End the mirror of an ended generation."""
        mirror = self._mirrors.pop(generation, None)
        if mirror is not None:
            mirror.end()
