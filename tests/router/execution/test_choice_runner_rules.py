"""Which failures of a choice are tried again, what its client is told, and when it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    Draining,
    Internal,
    LeaseExpired,
    MicroserveError,
    PeerUnreachable,
    Sampling,
    Structure,
    Timeout,
    TooLarge,
    Unauthorized,
    UnknownLease,
)
from router.admission.retry_budget import RESERVE, RetryBudget
from router.base.config import RouterConfig
from router.base.errors import (
    EngineUnreachable,
    Moved,
    NobodyListens,
    NoEngines,
    StrategyError,
    StrategyStalled,
)
from router.base.request import Request
from router.execution.choice_runner import _Choice
from router.telemetry import Metrics, Receipt

EOS, STOP = 0, 7
PROGRESS = 16  # tokens that reset the retry count, as docs/architecture.md says
REGEX = Structure(kind="regex", source="x")


@contextmanager
def choice(sampling: Sampling | None = None, output: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a choice after its first try, with three `attempts`; it has a claim on the budget."""
    info = SimpleNamespace(eos_token_ids=[EOS])
    runtime = SimpleNamespace(
        config=RouterConfig(attempts=3),
        metrics=Metrics(),
        registry=SimpleNamespace(model=SimpleNamespace(info=info)),
    )
    revision = SimpleNamespace(label="strategy mine (generation 1)")
    runner: Any = SimpleNamespace(
        execution=SimpleNamespace(runtime=runtime),
        receipt=Receipt("x", 1, "mine", {}, 0, 0),  # type: ignore[arg-type]
        revision=revision,
    )
    request = Request("x", [1, 2, 3], sampling or Sampling(), output=list(output))
    nothing: Any = None
    with RetryBudget(0.0).request() as claim:
        yield _Choice(runner, request, nothing, nothing, nothing, claim, nothing)


# Retries


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("x"), BadRange("x"), BadAddress("x"), Unauthorized("x"), TooLarge("x"),
        StrategyError("x"), StrategyStalled("x"), NoEngines("x"),
    ],
    ids=lambda error: error.type,
)  # fmt: skip
def test_what_would_fail_anywhere_is_not_tried_again(error: MicroserveError):
    with choice() as one:
        assert not one._may_retry(error)
        assert not one._claim.spent and not one._receipt.fallbacks
        one._origin = SimpleNamespace()  # but nothing has failed, if only a move did
        assert one._may_retry(error)


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (EngineUnreachable("x"), True),
        (NobodyListens("x"), True),
        (Draining("x"), True),
        (PeerUnreachable("x"), False),
        (Internal("x"), False),
        (Timeout("x"), False),
        (LeaseExpired("x"), False),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_only_the_first_loss_of_an_engine_costs_nothing(error: MicroserveError, free: bool):
    for tries, spends in ((1, not free), (2, True)):
        with choice() as one:
            one._tries = tries
            assert one._may_retry(error)
            assert one._claim.spent is spends
    with choice() as one:
        one._tries = 3
        assert not one._may_retry(error)
        assert not one._claim.spent
        assert one._may_retry(Moved("x"))  # a move is no failure


def test_a_retry_over_the_budget_is_denied_and_counted():
    with choice() as one:
        one._claim._budget.retrying = RESERVE
        assert one._may_retry(EngineUnreachable("x"))
        assert not one._may_retry(Internal("x"))
        assert one._receipt.fallbacks == ["retry_denied"]
        text = one._runtime.metrics.render().decode()
        assert "microserve_router_retries_denied_total 1.0" in text
        one._claim._budget.retrying -= 1
        assert one._may_retry(Internal("x"))


@pytest.mark.parametrize(("tokens", "status"), [(PROGRESS, 200), (PROGRESS - 1, 500)])
async def test_progress_resets_the_retry_count(route, fake, tokens: int, status: int):
    """Of two attempts, one fails after every `tokens` tokens."""
    a = fake("a", error_after=[(tokens, Internal("boom"))] * 3)
    most = 4 * PROGRESS
    body = {
        "prompt": [1, 2, 3], "max_tokens": most, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    async with route(a, attempts=2) as r:
        answered, reply = await r.post("/v1/completions", body, headers={"X-Request-Id": "x"})
        receipt = await r.receipt("x")
    assert answered == status
    assert len(a.named("start_generate")) == (4 if status == 200 else 2)
    if status == 200:
        assert reply["choices"][0]["token_ids"] == list(range(103, 103 + most))
        after = [retry["after_tokens"] for retry in receipt["retries"]]
        assert after == [tokens, 2 * tokens, 3 * tokens]


# What the client is told


@pytest.mark.parametrize(
    ("error", "wanted", "code"),
    [
        (BadRequest("no", param="x"), BadRequest, None),
        (TooLarge("no"), TooLarge, None),
        (Internal("no"), Internal, None),
        (Timeout("no"), Timeout, None),
        (BadRange("no"), StrategyError, None),
        (UnknownLease("no"), Internal, "unknown_lease"),
        (LeaseExpired("no"), Internal, "lease_expired"),
        (Unauthorized("no"), Internal, "unauthorized"),  # the router's key, not the client's
        (BadAddress("no"), Internal, "bad_address"),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_errors_about_leases_keys_and_ranges_are_not_the_clients(error, wanted, code):
    with choice() as one:
        told = one._for_client(error)
    assert (type(told), told.code) == (wanted, code)
    assert (told is error) is (type(error) is wanted)
    if told is not error:
        assert told.message.startswith("strategy mine (generation 1): ")


# The end


@pytest.mark.parametrize(
    ("sampling", "output", "end"),
    [
        ({}, (), None),
        ({}, (5,), None),
        ({}, (5, EOS), "stop"),
        ({}, (EOS, 5), None),
        ({}, (STOP,), None),
        ({"stop_token_ids": [STOP]}, (5, STOP), "stop"),
        ({"stop_token_ids": [STOP]}, (5, EOS), "stop"),
        ({"ignore_eos": True}, (5, EOS), None),
        ({"ignore_eos": True, "stop_token_ids": [STOP]}, (5, STOP), "stop"),
        ({"min_tokens": 1}, (5, EOS), "stop"),
        ({"min_tokens": 2}, (5, EOS), None),
        ({"min_tokens": 3}, (5, EOS), None),
        ({"structure": REGEX, "ignore_eos": True}, (5, EOS), "stop"),
        ({"structure": REGEX, "min_tokens": 9}, (5, EOS), "stop"),
        ({"structure": REGEX}, (5, 6), None),
        ({"max_tokens": 3}, (5, 6), None),
        ({"max_tokens": 3}, (5, 6, 7), "length"),
        ({"max_tokens": 3}, (5, 6, 7, 8), "length"),
        ({"max_tokens": 3}, (5, 6, EOS), "stop"),
    ],
)
def test_a_choice_whose_last_token_was_the_end_is_not_continued(sampling, output, end):
    with choice(Sampling(**sampling), output) as one:
        chunk = one._already_finished()
    assert (chunk.finish_reason if chunk is not None else None) == end
    assert chunk is None or not chunk.token_ids
