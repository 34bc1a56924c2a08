"""The values that an engine exports by reading its own state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter

from engine.execution.step_output import StepStats
from engine.service.engine import MicroserveEngine
from engine.service.metrics import Reading
from kvcache.cache import KVCache
from kvcache.lending import Loan
from kvcache.sequences import FetchCause

__all__ = ["engine_readings"]

TIER_GAUGES = {
    "promoted_tokens": "Tokens brought back for a prompt",
    "swaps_out": "Preempted sequences moved to the tier",
    "swaps_in": "Preempted sequences brought back",
    "bytes_in": "Bytes of KV written to the tier",
    "bytes_out": "Bytes of KV read from the tier",
    "failures": "Pages that could not be copied",
    "skipped": "Prefixes not copied, for lack of time or room",
}


PAGE_OWNERS = ("free", "cached", "active", "leased", "lent", "quarantined")


def engine_readings(engine: MicroserveEngine) -> list[Reading]:
    """Return the readings of an engine whose step loop is assigned."""
    cache, stats, mirrors = engine.cache, engine.loop.stats, engine.mirrors

    def stat(name: str, help: str, field: str) -> Reading:
        return Reading(name, help, partial(attrgetter(field), stats), counter=True)

    return [
        Reading("vllm:num_requests_running", "Generations in the batch", lambda: engine.running),
        Reading("vllm:num_requests_waiting", "Generations that wait", lambda: engine.waiting),
        Reading("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1", lambda: usage(cache)),
        Reading("microserve:leases", "Live receive leases", lambda: len(cache.leases())),
        *(
            Reading(
                "microserve:pages",
                "Pages of the pool, by owner",
                partial(_pages, cache, owner),
                labels={"owner": owner},
            )
            for owner in PAGE_OWNERS
        ),
        Reading(
            "microserve:pages_quarantined",
            "Pages that a put may still be writing",
            lambda: cache.page_use().quarantined,
        ),
        Reading("microserve:loans", "Loans to other engines", lambda: len(_loans(cache))),
        Reading(
            "microserve:pages_lent", "Pages lent to other engines", lambda: cache.page_use().lent
        ),
        *_creditor_readings(engine),
        *_borrowing_readings(engine),
        Reading("microserve:mirrors_running", "Running mirrors", lambda: mirrors.running),
        Reading(
            "microserve:mirrored_tokens", "Tokens mirrored", lambda: mirrors.sent, counter=True
        ),
        stat("microserve:steps", "Steps since the start", "steps"),
        stat("microserve:step_seconds", "Seconds spent in steps", "step_s"),
        stat("microserve:model_seconds", "Seconds spent in the model", "model_s"),
        stat("microserve:failed_steps", "Steps that failed", "failed_steps"),
        Reading(
            "microserve:worker_restarts",
            "Worker processes that were replaced",
            lambda: sum(worker.restarts for worker in engine.workers()),
            counter=True,
        ),
        Reading(
            "microserve:swap_wait_seconds",
            "Seconds that workers waited for pages of a step (--device-pages)",
            lambda: sum(worker.swap_wait_ms for worker in engine.workers()) / 1e3,
            counter=True,
        ),
        *(
            Reading(
                "microserve:swapped_bytes",
                "Bytes between the pool and the workers' own memory",
                partial(_swapped, engine, field),
                counter=True,
                labels={"direction": direction},
            )
            for direction, field in (("fetched", "fetched_bytes"), ("written", "written_bytes"))
        ),
        stat("microserve:expired_leases", "Leases that expired", "expired_leases"),
        stat("vllm:prompt_tokens", "Prompt tokens computed", "prompt_tokens"),
        stat("vllm:generation_tokens", "Tokens sampled", "generation_tokens"),
        Reading(
            "vllm:num_preemptions",
            "Preempted generations",
            lambda: engine.preemptions,
            counter=True,
        ),
        *_tier_readings(cache),
    ]


def _pages(cache: KVCache, owner: str) -> int:
    return int(getattr(cache.page_use(), owner))


def _loans(cache: KVCache) -> list[Loan]:
    with cache.lock:
        return cache.bookkeeping.lender.loans()


def _creditor_readings(engine: MicroserveEngine) -> Iterator[Reading]:
    """Yield what was computed over lent pages, for an engine that lends."""
    if (creditor := engine.creditor) is None:
        return

    def done(name: str, help: str, field: str, *, counter: bool = True) -> Reading:
        return Reading(name, help, lambda: getattr(creditor.statistics(), field), counter=counter)

    yield done("microserve:debtors", "Connected debtors", "debtors", counter=False)
    yield done("microserve:lent_answers", "Layers attended to for debtors", "answers")
    yield done("microserve:lent_refusals", "Queries of debtors that were refused", "refusals")
    yield done("microserve:lent_seconds", "Seconds of attention for debtors", "computed_s")


def _borrowing_readings(engine: MicroserveEngine) -> Iterator[Reading]:
    """Yield what is borrowed, for an engine that borrows."""
    if (borrowing := engine.borrowing) is None:
        return

    def use(name: str, help: str, field: str, *, counter: bool = False) -> Reading:
        return Reading(name, help, lambda: getattr(borrowing.use(), field), counter=counter)

    yield Reading(
        "microserve:pages_borrowed",
        "Pages borrowed from other engines",
        lambda: sum(borrowing.use().pages.values()),
    )
    yield use("microserve:borrowed_loans", "Loans of other engines", "loans")
    yield use("microserve:borrowed_blocks_free", "Borrowed blocks without KV", "free_blocks")
    yield use("microserve:borrow_refusals", "Refusals of creditors", "refusals", counter=True)
    yield use("microserve:borrowed_loans_lost", "Loans that were lost", "lost_loans", counter=True)
    stats = engine.loop.stats
    for cause in FetchCause:
        yield Reading(
            "microserve:home_blocks",
            "Blocks of contexts that came home, by cause",
            partial(_home, stats, cause),
            counter=True,
            labels={"cause": cause.value},
        )
    for field, help in (
        ("moved_blocks", "Blocks of contexts that have arrived at other engines"),
        ("lost_blocks", "Such blocks whose loans ended, or that could not come home in time"),
        ("recomputed_tokens", "Tokens of these blocks, which are computed again"),
        ("recovered_steps", "Steps that failed at another engine, and were computed again"),
    ):
        value = partial(attrgetter(field), stats)
        yield Reading(f"microserve:{field}", help, value, counter=True)


def _home(stats: StepStats, cause: FetchCause) -> int:
    return stats.home_blocks.get(cause, 0)


def _swapped(engine: MicroserveEngine, field: str) -> int:
    return sum(getattr(worker, field) for worker in engine.workers())


def _tier_readings(cache: KVCache) -> Iterator[Reading]:
    def pages(place: int, owner: str) -> int:
        return int(getattr(cache.tier_use()[place], owner))

    tiers = list(cache.tiers)
    for place, tier in enumerate(tiers):
        for owner in ("free", "cached", "swapped", "copying"):
            yield Reading(
                "microserve:tier_pages",
                "Pages below the pool, by owner",
                partial(pages, place, owner),
                labels={"tier": tier.name, "owner": owner},
            )
    for field, help in TIER_GAUGES.items():
        for tier in tiers:
            yield Reading(
                f"microserve:tier_{field}",
                help,
                partial(getattr, tier.stats, field),
                labels={"tier": tier.name},
            )


def usage(cache: KVCache) -> float:
    """Return the share of pages that are neither free nor merely cached."""
    use = cache.page_use()
    return 1.0 - (use.free + use.cached) / use.total
