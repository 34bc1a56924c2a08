"""The peak of a process's resident memory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PeakMemory"]


class PeakMemory:
    """Its growth since this was made."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        (self._process / "clear_refs").write_text("5")  # the peak is what is resident now
        self._before = self._now()

    def _now(self) -> int:
        lines = (self._process / "status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    @property
    def grown(self) -> int:
        """Bytes."""
        return self._now() - self._before
