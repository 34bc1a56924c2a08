"""A persistent tier: the cache survives the process, and damaged pages are not found."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_helpers import SIZE, assert_content, cached, compute, small_layout
from tier_helpers import at_rest, quiet, tiered, tiered_caches

from kvcache.cache import KVCache
from kvcache.errors import BadRequest
from kvcache.tiers.disk_store import DiskStore
from kvcache.types import SeqId

LAYOUT = small_layout(1)
SLOTS = 16
PROMPT = list(range(100, 100 + 4 * SIZE))
BRANCH = [*PROMPT[: 2 * SIZE], *range(700, 700 + 3 * SIZE)]
OTHER = list(range(500, 500 + 3 * SIZE))


def kept(folder: Path, slots: int = SLOTS, fingerprint: str = "same") -> DiskStore:
    return DiskStore(LAYOUT, slots, folder, keep="a.kv", fingerprint=fingerprint)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Callable[..., KVCache]]:
    """Restart the engine: close the previous cache and open another."""
    before: list[KVCache] = []

    def begin(slots: int = SLOTS, fingerprint: str = "same") -> KVCache:
        end()
        before.append(tiered(kept(tmp_path, slots, fingerprint), pages=16))
        return before[-1]

    def end() -> None:
        while before:
            cache = before.pop()
            at_rest(cache)
            cache.close()

    yield begin
    end()


def computed(cache: KVCache, *prompts: list[int]) -> None:
    for number, prompt in enumerate(prompts):
        cached(cache, number, prompt)
        quiet(cache)


def back(cache: KVCache, prompt: list[int]) -> int:
    """Return how many tokens of `prompt` are restored, bit for bit."""
    promotion = cache.promote(prompt)
    tokens = 0 if promotion is None else promotion.result(20)
    length = cache.add_sequence(SeqId(9), prompt)
    assert length >= tokens
    assert_content(cache, SeqId(9), prompt[:length])
    cache.remove_sequence(SeqId(9))
    return tokens


def damage(folder: Path, at: int) -> None:
    with (folder / "a.kv").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_prefixes_are_found_again(life: Callable[..., KVCache], tmp_path: Path):
    computed(life(), PROMPT, OTHER, BRANCH)
    cache = life()
    assert cache.persistent
    assert cache.tier_use()[0].cached == 4 + 3 + 3
    cache.check_integrity()
    assert [back(cache, each) for each in (BRANCH, PROMPT, OTHER)] == [5 * SIZE, 2 * SIZE, 3 * SIZE]
    assert (tmp_path / "a.kv").stat().st_mode & 0o777 == 0o600


def test_prefixes_survive_a_second_restart(life: Callable[..., KVCache]):
    computed(life(), PROMPT)
    computed(life(), OTHER)
    cache = life()
    assert (back(cache, PROMPT), back(cache, OTHER)) == (4 * SIZE, 3 * SIZE)


@pytest.mark.parametrize("other", [{"fingerprint": "other"}, {"slots": SLOTS + 1}])
def test_a_file_of_another_cache_is_cleared(life: Callable[..., KVCache], other: dict):
    computed(life(), PROMPT)
    assert back(life(**other), PROMPT) == 0
    cache = life()
    assert back(cache, PROMPT) == 0
    computed(cache, PROMPT)
    assert back(life(), PROMPT) == 4 * SIZE


def test_reused_slots_have_the_new_pages(life: Callable[..., KVCache]):
    """Six slots for ten pages."""
    computed(life(slots=6), PROMPT, OTHER, BRANCH)
    cache = life(slots=6)
    assert cache.tier_use()[0].cached <= 6
    assert back(cache, BRANCH) > 0
    for prompt in (PROMPT, OTHER):
        back(cache, prompt)


def test_sequences_that_were_swapped_out_are_not_found(life: Callable[..., KVCache]):
    cache = life()
    cache.add_sequence(SeqId(2))
    compute(cache, SeqId(2), PROMPT)
    cache.swap_out(SeqId(2)).result(20)
    assert cache.tier_use()[0].swapped == 4
    cache.remove_sequence(SeqId(2))
    assert life().tier_use()[0].cached == 0


def test_a_slot_reused_by_a_swap_is_not_found(life: Callable[..., KVCache]):
    """The slot held a page of a prefix before."""
    cache = life(slots=4)
    computed(cache, PROMPT)
    cache.add_sequence(SeqId(2))
    compute(cache, SeqId(2), OTHER)
    cache.swap_out(SeqId(2)).result(20)
    cache.remove_sequence(SeqId(2))
    cache = life(slots=4)
    assert cache.tier_use()[0].cached == 1
    assert back(cache, PROMPT) == SIZE


def records(folder: Path) -> Iterator[tuple[int, bytes]]:
    """Return the positions of the records that are not blank."""
    width = 8 + 16 + 16 + 4 * SIZE
    data = (folder / "a.kv").read_bytes()
    for at in range(4096, 4096 + SLOTS * width, width):
        if any(record := data[at : at + width]):
            yield at, record


@pytest.mark.parametrize("offset", [0, 8, 24, 40, 55])
def test_a_damaged_record_is_ignored(life: Callable[..., KVCache], tmp_path: Path, offset: int):
    """The pages after it are not found either: of four pages, only those before it are."""
    computed(life(), PROMPT)
    places = list(records(tmp_path))
    assert len(places) == 4
    third = PROMPT[2 * SIZE : 3 * SIZE]
    (at,) = (at for at, record in places if record[40:44] == third[0].to_bytes(4, "little"))
    damage(tmp_path, at + offset)
    cache = life()
    assert cache.tier_use()[0].cached == 2
    assert back(cache, PROMPT) == 2 * SIZE


def test_a_damaged_page_is_detected_when_read(life: Callable[..., KVCache], tmp_path: Path):
    computed(life(), PROMPT)
    size = (tmp_path / "a.kv").stat().st_size
    first = size - SLOTS * LAYOUT.page_bytes
    for slot in range(SLOTS):  # of all of them one bit
        damage(tmp_path, first + slot * LAYOUT.page_bytes + 77)
    cache = life()
    assert cache.tier_use()[0].cached == 4
    assert back(cache, PROMPT) == 0
    assert next(iter(cache.tiers)).stats.failures == 1
    assert cache.tier_use()[0].cached == 0


def test_a_truncated_or_invalid_file_is_cleared(life: Callable[..., KVCache], tmp_path: Path):
    path = tmp_path / "a.kv"
    for content in (b"", b"x", os.urandom(5000)):
        path.write_bytes(content)
        assert life().tier_use()[0].cached == 0
        computed(life(), PROMPT)
        assert back(life(), PROMPT) == 4 * SIZE
        life()
    os.truncate(path, path.stat().st_size - (SLOTS - 2) * LAYOUT.page_bytes)
    cache = life()
    assert back(cache, PROMPT) <= 2 * SIZE
    computed(cache, OTHER)
    assert back(life(), OTHER) == 3 * SIZE


def test_a_file_in_use_is_refused(tmp_path: Path):
    store = kept(tmp_path)
    with pytest.raises(BadRequest, match=r"a\.kv is in use by another engine"):
        kept(tmp_path)
    open_files = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert open_files.count(str((tmp_path / "a.kv").resolve())) == 1
    store.close()
    kept(tmp_path).close()


def test_a_link_is_not_followed(tmp_path: Path):
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "a.kv").symlink_to(target)
    with pytest.raises(BadRequest, match="symbolic links"):
        kept(tmp_path)
    assert target.read_text() == "precious"


WRITER = """
import itertools, random, sys
sys.path.insert(0, "tests/kvcache")
sys.path.insert(0, "tests/kvcache/tiers")
sys.path.insert(0, "tests")
from pathlib import Path
from kv_helpers import cached
from test_disk_kept import kept, prompts
from tier_helpers import tiered

cache = tiered(kept(Path(sys.argv[1])), pages=16)
print("ready", flush=True)
rng = random.Random(int(sys.argv[2]))
for number in itertools.count():
    cached(cache, number, rng.choice(prompts()))
"""


def prompts() -> list[list[int]]:
    """More prompts than fit, with common prefixes."""
    rng = random.Random(1)
    stems = [[rng.randrange(9) for _ in range(3 * SIZE)] for _ in range(3)]
    return [
        [*stems[number % 3][: rng.randrange(3 * SIZE)], *(rng.randrange(9) for _ in range(20))]
        for number in range(30)
    ]


@pytest.mark.processes
@pytest.mark.slow
def test_after_kills_at_any_moment_found_pages_are_right(tmp_path: Path):
    """A process that writes continuously and is killed repeatedly."""
    rng = random.Random(2)
    found = 0
    for number in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            try:
                process.wait(rng.uniform(0.02, 0.3))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        with tiered_caches() as make:
            cache = make(kept(tmp_path), pages=16)
            cache.check_integrity()
            found += sum(back(cache, prompt) for prompt in prompts())
            assert next(iter(cache.tiers)).stats.failures == 0
    assert found > 4 * SIZE
