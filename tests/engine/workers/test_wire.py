"""Messages between a lead and its workers."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from engine.workers.exchange import MOST_BYTES, Kind, receive, send, send_text, text_of


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        other.settimeout(5)
        yield one, other


def words(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def test_arrays_arrive_as_they_were_sent(ends):
    one, other = ends
    arrays = [[1, -2, 3], np.arange(6, dtype=np.int32).reshape(2, 3), [], [2**62]]
    send(one, Kind.STEP, arrays)
    send(one, Kind.DONE)
    kind, got = receive(other)
    assert kind == Kind.STEP
    assert [array.tolist() for array in got] == [[1, -2, 3], [0, 1, 2, 3, 4, 5], [], [2**62]]
    assert receive(other) == (Kind.DONE, [])


def test_a_message_larger_than_the_socket_buffer_arrives(ends):
    one, other = ends
    sender = threading.Thread(target=send, args=(one, Kind.STEP, [range(1_000_000)]))
    sender.start()
    assert receive(other)[1][0].sum() == 499_999_500_000
    sender.join()


def test_text_arrives_as_it_was_sent(ends):
    one, other = ends
    send_text(one, Kind.FAILED, "weiß nicht")
    kind, arrays = receive(other)
    assert (kind, text_of(arrays)) == (Kind.FAILED, "weiß nicht")
    assert not text_of([])


def test_the_end_of_the_other_process_is_an_error(ends):
    one, other = ends
    one.sendall(words(24))
    one.close()
    with pytest.raises(EOFError):
        receive(other)


@pytest.mark.parametrize(
    "sent",
    [
        words(MOST_BYTES + 8),
        words(-8),
        words(17),
        words(16, Kind.DONE, 1),  # an array without a length
        words(24, Kind.DONE, 1, -1),
        words(24, Kind.DONE, 1, 5),
        words(24, Kind.DONE, 0, 5),
        words(16, 99, 0),
    ],
)
def test_what_is_no_message_is_refused(ends, sent: bytes):
    one, other = ends
    one.sendall(sent)
    with pytest.raises(ValueError):
        receive(other)
