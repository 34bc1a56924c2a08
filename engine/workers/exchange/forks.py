"""Messages to the process that workers are forked from, and its answers: two int64 each.

`FORK` comes with the descriptors that the worker gets; the answer is its pid, or a negative error
number. `REAP` comes with the pid of a worker that has ended; the answer is its exit code, negative
for a signal.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["FORK", "MESSAGE", "REAP"]

FORK: Final = 1
REAP: Final = 2
MESSAGE: Final = struct.Struct("<qq")  # command, and its number or that of the answer
