from __future__ import annotations

from kvcache.memory.write_rights import WriteRights


def test_a_right_taken_alone_is_held_once():
    rights = WriteRights()
    assert rights.try_acquire_right(3)
    assert not rights.try_acquire_right(3)
    assert not rights.try_acquire_right(3, share=5)
    assert rights.try_acquire_right(4)
    rights.release_right(3)
    assert rights.try_acquire_right(3, share=5)


def test_a_right_is_shared_by_equal_share_numbers():
    rights = WriteRights()
    assert rights.try_acquire_right(3, share=5)
    assert rights.try_acquire_right(3, share=5)
    assert not rights.try_acquire_right(3, share=6)
    assert not rights.try_acquire_right(3)
    rights.release_right(3)
    assert not rights.try_acquire_right(3)
    rights.release_right(3)
    assert rights.try_acquire_right(3)


def test_the_first_share_locks_and_the_last_one_unlocks():
    calls: list[tuple[int, ...]] = []

    def take(slot: int, share: int) -> bool:
        calls.append((slot, share))
        return slot != 9

    rights = WriteRights(take, lambda slot: calls.append((slot,)))
    assert rights.try_acquire_right(3, share=5)
    assert rights.try_acquire_right(3, share=5)
    assert calls == [(3, 5)]
    rights.release_right(3)
    assert calls == [(3, 5)]
    rights.release_right(3)
    assert calls == [(3, 5), (3,)]
    assert not rights.try_acquire_right(9)
    assert not rights.try_acquire_right(9)  # a refused right is not held
    assert calls[2:] == [(9, 0), (9, 0)]
