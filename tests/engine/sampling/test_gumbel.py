from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from engine.sampling.gumbel import GROUPS, Gumbel, _exponential

VOCAB = 6 * GROUPS + 5
Floats = npt.NDArray[np.float64]


def uniform(noise: Floats) -> Floats:
    """Return the uniform variables that map to this Gumbel noise."""
    return np.exp(-np.exp(-noise))


def furthest(values: Floats) -> float:
    """Return Kolmogorov's distance from the uniform distribution, times √n.

    It exceeds 1.95 once in a thousand."""
    values = np.sort(values.ravel())
    steps = np.arange(len(values) + 1) / len(values)
    distance = max((steps[1:] - values).max(), (values - steps[:-1]).max())
    return float(distance * np.sqrt(len(values)))


def of_all(draws: list[tuple[int, int, int]], vocab: int = VOCAB) -> Floats:
    return Gumbel(draws, vocab).at(np.arange(len(draws))[:, None], np.arange(vocab)[None])


SEEDS = [(seed, 0, 7) for seed in range(50)]
CHOICES = [(5, choice, 7) for choice in range(50)]
POSITIONS = [(5, 0, position) for position in range(50)]


@pytest.mark.parametrize("draws", [SEEDS, CHOICES, POSITIONS])
def test_noise_is_gumbel_noise(draws: list[tuple[int, int, int]]):
    values = uniform(of_all(draws))
    assert ((values > 0) & (values < 1)).all()
    assert furthest(values) < 1.95
    for token in (0, 1, GROUPS, VOCAB - 1):  # the noise of one token across draws
        assert furthest(uniform(of_all([(s, c, p) for s, c, p in draws])[:, token])) < 1.95


@pytest.mark.parametrize("draws", [SEEDS, CHOICES, POSITIONS])
def test_tokens_and_draws_are_independent(draws: list[tuple[int, int, int]]):
    """No correlation exceeds four standard deviations.

    Compares each draw with the next, each token with the next and with others of its group, and
    their squares.
    """
    values = uniform(of_all(draws)) - 0.5
    for some in (values, values**2 - (values**2).mean()):
        pairs = [(some[:-1], some[1:])]
        pairs += [(some[:, :-by], some[:, by:]) for by in (1, 2, GROUPS, 2 * GROUPS)]
        for one, other in pairs:
            r = np.corrcoef(one.ravel(), other.ravel())[0, 1]
            assert abs(r) < 4 / np.sqrt(one.size)


def test_a_groups_maximum_belongs_to_one_of_its_tokens():
    """Each token of the group is equally likely to have the maximum."""
    noise = Gumbel(SEEDS, 6 * GROUPS)
    of_groups = of_all(SEEDS, 6 * GROUPS).reshape(len(SEEDS), 6, GROUPS)
    assert (noise.group_maxima() == of_groups.max(1)).all()
    counts = np.bincount(of_groups.argmax(1).ravel(), minlength=6)
    expected = counts.sum() / 6
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # once in a thousand


def test_group_maxima_with_groups_of_different_sizes():
    most, of_tokens = Gumbel(SEEDS, VOCAB).group_maxima(), of_all(SEEDS)
    for group in (0, 4, 5, GROUPS - 1):
        assert (most[:, group] >= of_tokens[:, group::GROUPS].max(1)).all()


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**53 + 1, 2**63, 2**64 - 1])
def test_neighbouring_seeds_give_different_noise(seed: int):
    near = seed - 1 if seed == 2**64 - 1 else seed + 1
    own, other = of_all([(seed, 0, 5), (near, 0, 5)])
    assert np.isfinite(own).all()
    assert (own != other).all()


def test_the_largest_choice_and_position_work():
    noise = of_all([(1, 2**31 - 1, 2**20), (1, 2**31 - 1, 2**20 - 1)])
    assert np.isfinite(noise).all()
    assert (noise[0] != noise[1]).all()


def test_noise_at_single_tokens_equals_the_full_noise():
    everywhere = of_all(SEEDS)
    few = Gumbel([SEEDS[7]], VOCAB).at(np.array([0, 0]), np.array([3, VOCAB - 1]))
    assert few.tolist() == everywhere[7, [3, VOCAB - 1]].tolist()


# A reference in Python's integers: another engine, or a later release, must draw the same tokens


WORD = 2**64


def mixed(word: int) -> int:
    word %= WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def exponential(key: int, number: int) -> float:
    upper = mixed(key + number * 0x9E3779B97F4A7C15) >> 32
    return -math.log((upper + 0.5) / 2**32)


def reference(draw: tuple[int, int, int], vocab: int, token: int) -> float:
    seed, choice, position = draw
    key = mixed(mixed(seed) + choice * 2**32 + position)
    members, (member, group) = math.ceil(vocab / 2048), divmod(token, 2048)
    lower = mixed(key + group * 0x9E3779B97F4A7C15) % 2**32
    noise = exponential(key, group) / members
    if lower * members // 2**32 != member:
        noise += exponential(key, 2**32 + token)
    return -math.log(noise)


@pytest.mark.parametrize(
    "draw", [(0, 0, 0), (7, 2, 5), (-1, 0, 3), (2**64 - 1, 2**31 - 1, 2**20), (-(2**63), 1, 0)]
)
@pytest.mark.parametrize("vocab", [300, 2048, 2049, 49152])
def test_noise_is_defined_to_the_last_bits(draw: tuple[int, int, int], vocab: int):
    tokens = [token for token in (0, 1, 299, 2047, 2048, 30_000, 49_151) if token < vocab]
    noise = Gumbel([draw], vocab)
    expected = [reference(draw, vocab, token) for token in tokens]
    assert noise.at(np.zeros(len(tokens), dtype=np.int64), np.array(tokens)) == pytest.approx(
        expected, rel=1e-12
    )
    members = range(math.ceil(vocab / 2048))
    for group in (0, 1, 2047):
        largest = max(reference(draw, len(members) * 2048, group + 2048 * n) for n in members)
        assert noise.group_maxima()[0, group] == pytest.approx(largest, rel=1e-12)


def test_the_member_with_the_largest_noise_is_chosen_by_all_bits_of_the_lower_half():
    """The hashes of two groups are on either side of the limit between two members."""
    vocab, draw = 3 * GROUPS, (0, 0, 0)
    noise = Gumbel([draw], vocab)
    noise._hashes[0, :2] = [0xAAAA_AAAA | 9 << 40, 0xAAAA_AAAB | 9 << 40]  # 3n / 2³² is about 2
    tokens = np.arange(2) + np.arange(3)[:, None] * GROUPS
    assert noise.at(np.zeros_like(tokens), tokens).argmax(0).tolist() == [1, 2]


def test_the_least_and_the_largest_hash_give_finite_noise():
    hashes = np.array([0, 2**32 - 1, 2**32, 2**64 - 1], dtype=np.uint64)
    values = _exponential(hashes)
    assert np.isfinite(values).all() and (values > 0).all()
    assert values[0] == values[1] == pytest.approx(33 * math.log(2))
    assert values[2] == pytest.approx(33 * math.log(2) - math.log(3))
