"""Messages between the lead and a worker: a kind and int64 arrays, over a socket pair.

length of the rest (8 bytes) │ kind (8) │ arrays (8) │ length of each (8) │ their elements
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_BYTES", "Array", "Kind", "receive", "send", "send_text", "text_of"]

Array = npt.NDArray[np.int64]
MOST_BYTES = 1 << 28  # of a message


class Kind(IntEnum):
    """What a message says. The lead sends the first ones, and a worker answers each."""

    SETTINGS = 1  # JSON: load this part of the model
    ALLOCATE = 2  # map the part's pages
    REJOIN = 3  # text, a rendezvous: meet the workers again, after one of them was replaced
    STEP = 4
    DONE = 16  # with text or numbers, as the message wants
    FAILED = 17  # with text


def send(to: socket.socket, kind: Kind, arrays: Sequence[Array | Sequence[int]] = ()) -> None:
    """Send a message. Raises `OSError` if the other process is gone."""
    parts = [np.ascontiguousarray(array, dtype=np.int64).ravel() for array in arrays]
    head = np.array([0, kind, len(parts), *map(len, parts)], dtype=np.int64)
    head[0] = head.nbytes - 8 + sum(part.nbytes for part in parts)
    to.sendall(b"".join([head.tobytes(), *(part.tobytes() for part in parts)]))


def receive(source: socket.socket) -> tuple[Kind, list[Array]]:
    """Return the next message.

    Raises `EOFError` if the other process is gone, `TimeoutError` as the socket is set, and
    `ValueError` for what is no message.
    """
    (size,) = np.frombuffer(_read(source, 8), dtype=np.int64)
    if not 16 <= size <= MOST_BYTES or size % 8:
        raise ValueError(f"a message of {size} bytes")
    words = np.frombuffer(_read(source, int(size)), dtype=np.int64)
    kind, count = Kind(int(words[0])), int(words[1])
    lengths = words[2 : 2 + count]
    if not 0 <= count <= len(words) - 2 or lengths.min(initial=0) < 0:
        raise ValueError(f"a message of {count} arrays in {size} bytes")
    if 2 + count + int(lengths.sum()) != len(words):
        raise ValueError(f"arrays of {int(lengths.sum())} elements in {size} bytes")
    return kind, np.split(words[2 + count :], np.cumsum(lengths)[:-1]) if count else []


def send_text(to: socket.socket, kind: Kind, text: str) -> None:
    """Send a message of text. Raises as `send`."""
    send(to, kind, [np.frombuffer(text.encode(), dtype=np.uint8)])


def text_of(arrays: Sequence[Array]) -> str:
    """Return the text of a message."""
    return bytes(arrays[0].astype(np.uint8)).decode(errors="replace") if arrays else ""


def _read(source: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = source.recv_into(view)
        if not got:
            raise EOFError("the other process has ended")
        view = view[got:]
    return data
