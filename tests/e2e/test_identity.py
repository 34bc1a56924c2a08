"""The same request gives the same tokens, however its work is divided (float32, greedy)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import pytest
from e2e_deployment import Deployment, Engine
from e2e_forked import forked
from e2e_reference import Reference, hf_tiny
from smollm2_greedy import continuations

LENGTHS = [1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 257, 400, 600, 900, 1200, 1500]
EDGES = [1, 2, 15, 16, 17, 33, 128, 129, 400, 1500]  # of pages and blocks, and long ones
NEW = 16
ids = count()


def prompt_of(length: int, *, vocab: int = 500, salt: int = 0) -> list[int]:
    source = random.Random(f"{length}/{salt}")
    return [source.randrange(vocab) for _ in range(length)]


def split(
    prompt: list[int], end: int, sender: Engine, receiver: Engine
) -> tuple[list[int], dict[str, int]]:
    """Call prep_recv, remote_send and start_generate; return the tokens and the send's reply."""
    request_id = f"split-{next(ids)}"
    lease = receiver.call("prep_recv", request_id=request_id, prompt=prompt, end=end)
    sent: dict[str, int] = {}
    if lease["match_len"] < end:
        sent = sender.call(
            "remote_send",
            request_id=request_id,
            prompt=prompt,
            begin=lease["match_len"],
            end=end,
            kv_addr=lease["kv_addr"],
        )
        assert sent["sent_tokens"] == end - lease["match_len"]
        assert sent["cached_tokens"] <= sent["sent_tokens"]
    tokens = receiver.generate(
        prompt, greedy=NEW, request_id=request_id, begin=end, lease_id=lease["lease_id"]
    )
    return tokens, sent


@pytest.fixture(scope="session")
def tiny_reference() -> Iterator[Reference]:
    yield Reference(hf_tiny())


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [
        EDGES,
        pytest.param(sorted({*LENGTHS} - {*EDGES}), marks=pytest.mark.thorough),
    ],
    ids=["edges", "others"],
)
def test_tokens_equal_transformers(
    tiny: Deployment, tiny_reference: Reference, lengths: list[int]
) -> None:
    """This compares one engine; `tests/conformance` compares all strategies with one engine."""
    tiny.use("data_parallel")
    for length in lengths:
        prompt = prompt_of(length)
        wanted = tiny_reference.greedy(prompt, NEW)
        # The second run finds the first one's pages in the caches.
        for _ in range(2):
            reply = tiny.complete(prompt, greedy=NEW, model="tiny")
            tiny_reference.check(prompt, reply["choices"][0]["token_ids"], wanted)
    print(f"{tiny_reference.excused} near ties excused")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tenth",  # these have all lengths between them
    [n if n in (0, 3, 5, 10) else pytest.param(n, marks=pytest.mark.thorough) for n in range(11)],
)
def test_every_split_and_every_cache_state(tiny: Deployment, tenth: int) -> None:
    """`end` at each tenth; both caches cold, then warm receiver, then warm sender (Figure 8).

    Each tenth is tested with a quarter of the lengths, because this is the slowest of all tests.
    """
    sender, receiver, oracle = tiny.engines
    for length in LENGTHS[tenth % 4 :: 4]:
        end = min(length * tenth // 10, length - 1)
        prompt = prompt_of(length, salt=1 + tenth)
        wanted = oracle.generate(prompt, greedy=NEW, request_id=f"oracle-{next(ids)}")
        assert len(wanted) == NEW

        cold, sent = split(prompt, end, sender, receiver)
        assert cold == wanted, f"cold, {end} of {length}"
        if end:
            assert sent["cached_tokens"] == 0
            assert sent["computed_tokens"] == end
        # First the receiver has cached more (it has decoded), then the sender.
        warm_receiver, _ = split(prompt, end, oracle, receiver)
        assert warm_receiver == wanted, f"warm receiver, {end} of {length}"
        fresh = [token + 1 for token in prompt[:1]] + prompt[1:]
        wanted = oracle.generate(fresh, greedy=NEW, request_id=f"oracle-{next(ids)}")
        warm_sender, sent = split(fresh, end, oracle, receiver)
        assert warm_sender == wanted, f"warm sender, {end} of {length}"
        if end >= 32:
            assert sent["cached_tokens"] > 0
    for engine in tiny.engines:
        engine.check_at_rest()


def test_a_receiver_that_has_cached_more_than_the_sender(tiny: Deployment) -> None:
    """Case 2 of Figure 8: the sender computes all tokens and sends only the missing pages."""
    sender, receiver, oracle = tiny.engines
    prompt = prompt_of(320, salt=99)
    wanted = oracle.generate(prompt, greedy=NEW, request_id=f"oracle-{next(ids)}")
    receiver.generate(prompt[:160], greedy=1, request_id=f"warm-{next(ids)}")
    tokens, sent = split(prompt, 319, sender, receiver)
    assert tokens == wanted
    assert sent["sent_tokens"] == 319 - 160
    assert sent["computed_tokens"] == 319
    assert sent["cached_tokens"] == 0


@pytest.mark.slow
def test_output_continues_on_another_engine(tiny: Deployment) -> None:
    """`output` resumes a stream exactly at any token, greedy and sampled."""
    first, second, _ = tiny.engines
    prompt = prompt_of(77, salt=5)
    for sampling in (
        {},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.8, "seed": 9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    ):
        whole = first.generate(prompt, greedy=40, request_id=f"whole-{next(ids)}", **sampling)
        for cut in (1, 16, 39):
            rest = second.generate(
                prompt,
                greedy=40,
                request_id=f"rest-{next(ids)}",
                output=whole[:cut],
                **sampling,
            )
            assert whole[:cut] + rest == whole


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch(tiny: Deployment) -> None:
    """A request has the same tokens alone and among 24 others, however the scheduler chunks it."""
    import concurrent.futures

    _, engine, oracle = tiny.engines
    prompts = [prompt_of(length, salt=7) for length in (5, 40, 130, 700) for _ in range(1)]
    prompts += [prompt_of(30 + 11 * n, salt=8) for n in range(20)]
    wanted = [oracle.generate(p, greedy=24, request_id=f"alone-{next(ids)}") for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(
            pool.map(
                lambda p: engine.generate(p, greedy=24, request_id=f"batch-{next(ids)}"), prompts
            )
        )
    assert together == wanted


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Deployment]:
    flags = ("--dtype", "float32", "--pool-pages", "128")
    with forked("smollm2", *flags, roles=["any"] * 2) as deployment:
        yield deployment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "params", "prompts"),
    [
        pytest.param("data_parallel", {}, slice(1), marks=pytest.mark.thorough),
        ("prefill_decode", {}, slice(1, 2)),
        pytest.param("prefill_decode", {}, slice(None), marks=pytest.mark.thorough),
        ("balanced", {"ratio": 0.3}, slice(-1, None)),
        pytest.param("balanced", {"ratio": 0.3}, slice(-1), marks=pytest.mark.thorough),
    ],
)
def test_smollm2_strategies_equal_transformers(
    smollm2: Deployment, strategy: str, params: dict[str, float], prompts: slice
) -> None:
    smollm2.use(strategy, **params)
    for wanted in continuations()[prompts]:
        for salt in ("cold", "warm"):
            reply = smollm2.complete(wanted.prompt, greedy=8, model="smollm2")
            wanted.check(reply["choices"][0]["token_ids"], f"{strategy} {salt}")
