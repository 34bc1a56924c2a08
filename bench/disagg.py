"""The cost of prefilling on one engine and decoding on another, and of a replica.

Purpose: check the claims of the microserving paper about moving KV (§4.2, Figure 12, Table 3), and
those of DéjàVu about replicating KV, on two engines with a core each.

How: SmolLM2, engines with one thread on a core of their own, called as a router calls them but
without one. Measurements alternate: within a repeat the two sides of each figure run one right
after the other, the engines swap roles from repeat to repeat, and a ratio is the median of the
repeats' own ratios. So other load on the machine affects both sides.

- `ttft_1p1d_vs_single`: time to first token of 1000 tokens that no engine has cached, with prefill
  on one engine and decode on the other, over that on one engine. Theory: each layer's KV is put
  while later layers are computed, so the extra cost is a step for the last token, and the calls.
- `migrate_vs_recompute`: prompts of 1000, 3000 and 5000 tokens of which all but 500 are cached on
  another engine. Time to first token if everything is computed, over that if the cached part is
  migrated (`prep_recv`, `remote_send`, `commit`) and 500 are computed. Theory: migration is flat
  except for attention over the longer context; computing is linear or worse (Figure 12; the paper
  has 1.7 at 1000).
- `owner_vs_recompute`: the same with the paper's own flow for that figure. The engine that has the
  context computes the new tokens and sends all; the other one generates (`prep_recv`,
  `remote_send`, `start_generate`).
- `overlap_share`: a send of such a prompt puts the cached pages while it computes the first chunk
  of the 500 tokens, and puts these layer by layer. Table 3 gives the time of a layer's transfer
  over that of its computation; a transfer shorter than the computation is hidden. Here the share is
  1 - E / T: T is the time of such a send if the sender has everything cached, so that nothing
  hides the transfer; E is the time that the send continues after its last layer is computed. This
  is a share of time; the copies still take CPU of the core that computes.
- `replication_tpot`: time per output token with a mirror on the other engine, at most 16 tokens
  behind, over that without. Theory: 16 tokens of KV are copied while the next step is computed.
- `cpu`: the same ratios in CPU seconds of both engines together. If each engine has its core for
  itself, they equal the ratios of time; if other processes use the cores, they are more reliable.

Run: `make bench-disagg`, or `python -m bench.disagg [--save] [--repeats 3]
[--dtype float32]`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.deployment import deployed
from bench.engine_calls import Engine, send, source, tokens, unused_id
from bench.processes import cpu_s
from bench.report import publish, spread, table

FLAGS = ("smollm2", "--engines", "2", "--pool-pages", "2048")
TTFT_TOKENS = 1000
LENGTHS = (1000, 3000, 5000)
NEW = 500
PAGE = 16  # tokens; only full pages are cached and migrated
MIRRORED = {"prompt": 32, "output": 96, "every": 16}
TIMES = 3  # repetitions of the short measurements within a repeat

Sample = dict[str, float]


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--save", action="store_true")
    options.add_argument("--dtype", default="float32")
    given = options.parse_args()
    repeats, flags = given.repeats, (*FLAGS, "--dtype", given.dtype)
    began = time.monotonic()
    firsts: list[Sample] = []
    moves: dict[int, list[Sample]] = {length: [] for length in LENGTHS}
    mirrors: list[Sample] = []
    with deployed(*flags) as deployment:
        key = deployment.engine_key
        pids = deployment.pids[1:]
        pair = [Engine(url, pid, key) for url, pid in zip(deployment.engines, pids, strict=True)]
        for engine in pair:
            engine.generate(tokens(100), 4)  # warm
        for one, other in itertools.islice(itertools.cycle((pair, pair[::-1])), repeats):
            for _ in range(TIMES):
                firsts.append(_note("ttft", first_token(one, other)))
                mirrors.append(_note("mirror", mirrored(one, other)))
            for length, samples in moves.items():
                samples.append(_note(f"move {length}", moved(one, other, length)))
    show(firsts, moves, mirrors)
    publish(
        "disagg",
        {
            "engines": flags,
            "repeats": repeats,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "load_average": os.getloadavg(),
            "ttft_1p1d_vs_single": ratio(firsts, "split", "single"),
            "migrate_vs_recompute": {
                str(length): ratio(samples, "recompute", "migrate")
                for length, samples in moves.items()
            },
            "owner_vs_recompute": {
                str(length): ratio(samples, "recompute", "owner")
                for length, samples in moves.items()
            },
            "replication_tpot": ratio(mirrors, "mirrored", "alone"),
            "cpu": {
                "ttft_1p1d_vs_single": ratio(firsts, "split_cpu", "single_cpu"),
                "migrate_vs_recompute": {
                    str(length): ratio(samples, "recompute_cpu", "migrate_cpu")
                    for length, samples in moves.items()
                },
                "replication_tpot": ratio(mirrors, "mirrored_cpu", "alone_cpu"),
            },
            "overlap_share": {
                str(length): round(statistics.median(map(overlap, samples)), 3)
                for length, samples in moves.items()
            },
            "ms": {
                "ttft": spreads(firsts),
                "move": {str(length): spreads(samples) for length, samples in moves.items()},
                "tpot": spreads(mirrors),
            },
        },
    )


def first_token(sender: Engine, receiver: Engine) -> Sample:
    """Return the time to first token, disaggregated and not (ms)."""
    with timed(sender, receiver) as single:
        receiver.generate(tokens(TTFT_TOKENS), 1)
    with timed(sender, receiver) as split:
        disaggregated(sender, receiver, tokens(TTFT_TOKENS))
    return _named(single=single, split=split)


def disaggregated(sender: Engine, receiver: Engine, prompt: list[int]) -> None:
    """Generate a token on the receiver; the sender computes the prompt up to its last token."""
    request_id, end = unused_id(), len(prompt) - 1
    lease, _ = send(sender, receiver, request_id, prompt, end)
    receiver.generate(prompt, 1, request_id=request_id, begin=end, lease_id=lease["lease_id"])


def moved(sender: Engine, receiver: Engine, length: int) -> Sample:
    """Return the times of one prompt length (ms).

    These are the times of computing all, of migrating the cached part and computing the rest, of
    the owner of the cached part computing the rest and sending all, and of two sends: one computes
    the new tokens, the other has all cached.
    """
    context = tokens(length - NEW)
    with timed(sender, receiver) as recompute:  # the prompt is cached there from now on
        sender.generate(context + tokens(NEW), 1)
    # A send that computes, then one with everything cached. Neither result is kept.
    prompt = context + tokens(NEW)
    replies = []
    for _ in range(2):
        request_id = unused_id()
        lease, sent = send(sender, receiver, request_id, prompt, length // PAGE * PAGE)
        receiver.call("release", lease_id=lease["lease_id"])
        replies.append(sent)
    computing, cached = replies
    if not 0 < computing["computed_tokens"] <= NEW + PAGE or cached["computed_tokens"]:
        raise SystemExit(f"not cached as it should be: {replies}")
    prompt, request_id = context + tokens(NEW), unused_id()
    with timed(sender, receiver) as migrate:
        lease, sent = send(sender, receiver, request_id, prompt, len(context) // PAGE * PAGE)
        receiver.call("commit", lease_id=lease["lease_id"])
        receiver.generate(prompt, 1)
    context = tokens(length - NEW)  # the receiver has the other one now
    sender.generate(context, 1)
    with timed(sender, receiver) as owner:
        disaggregated(sender, receiver, context + tokens(NEW))
    return _named(recompute=recompute, migrate=migrate, owner=owner) | {
        "migrate_put": sent["ms"],
        "put_alone": cached["ms"],
        "put_exposed": computing["put_ms"],
        "send": computing["ms"],
    }


def mirrored(runner: Engine, replica: Engine) -> Sample:
    """Return the time per output token without a mirror and with one (ms)."""
    samples = {}
    kinds = ["alone", "mirrored"]
    source.shuffle(kinds)
    for kind in kinds:
        prompt = tokens(MIRRORED["prompt"])
        fields: dict[str, Any] = {}
        lease = None
        if kind == "mirrored":
            lease = replica.call(
                "prep_recv", request_id=unused_id(), prompt=prompt, end=len(prompt),
                reserve=MIRRORED["output"],
            )  # fmt: skip
            fields["mirror"] = {"kv_addr": lease["kv_addr"], "every": MIRRORED["every"]}
        with timed(runner, replica) as sample:
            times = runner.generate(prompt, MIRRORED["output"], **fields)
        sample["ms"] = (times[-1] - times[0]) / (len(times) - 1)
        samples[kind] = sample
        if lease is not None:
            replica.call("release", lease_id=lease["lease_id"])
    return _named(**samples)


@contextmanager
def timed(*engines: Engine) -> Iterator[Sample]:
    """Measure the time of the body and the engines' CPU time (`ms`, `cpu_ms`)."""
    sample: Sample = {}
    cpu, began = sum(cpu_s(engine.pid) for engine in engines), time.perf_counter()
    yield sample
    sample["ms"] = (time.perf_counter() - began) * 1e3
    sample["cpu_ms"] = (sum(cpu_s(engine.pid) for engine in engines) - cpu) * 1e3


def _named(**samples: Sample) -> Sample:
    """Merge the samples into one, with keys `name` and `name_cpu`."""
    one = {}
    for name, sample in samples.items():
        one[name], one[f"{name}_cpu"] = sample["ms"], sample["cpu_ms"]
    return one


def ratio(samples: list[Sample], over: str, under: str) -> float:
    """Return the median of the samples' ratios."""
    return round(statistics.median(sample[over] / sample[under] for sample in samples), 3)


def overlap(sample: Sample) -> float:
    """Return the share of a transfer that was hidden behind compute."""
    return max(0.0, 1 - sample["put_exposed"] / sample["put_alone"])


def spreads(samples: list[Sample]) -> dict[str, dict[str, float]]:
    return {name: spread([sample[name] for sample in samples]) for name in samples[0]}


def show(firsts: list[Sample], moves: dict[int, list[Sample]], mirrors: list[Sample]) -> None:
    rows = [
        [
            str(length),
            *(
                f"{statistics.median(sample[name] for sample in samples):.0f}"
                for name in (
                    "recompute",
                    "migrate",
                    "owner",
                    "migrate_put",
                    "put_alone",
                    "put_exposed",
                )
            ),
            f"{ratio(samples, 'recompute', 'migrate'):.2f}",
            f"{ratio(samples, 'recompute', 'owner'):.2f}",
            f"{statistics.median(map(overlap, samples)):.2f}",
        ]
        for length, samples in moves.items()
    ]
    table(
        f"Figure 12 and Table 3: {NEW} tokens new, ms, medians of {len(firsts) // TIMES}",
        [
            "tokens",
            "recompute",
            "migrate",
            "owner",
            "of it put",
            "put all",
            "exposed",
            "migrate ratio",
            "owner ratio",
            "overlap",
        ],
        rows,
    )
    rows = [
        [title, *(f"{spreads(samples)[name]['median']:.1f}" for name in names),
         f"{ratio(samples, names[1], names[0]):.3f}"]
        for title, samples, names in (
            (f"first token of {TTFT_TOKENS}: one engine, 1P1D", firsts, ("single", "split")),
            ("per token: alone, with a mirror", mirrors, ("alone", "mirrored")),
        )
    ]  # fmt: skip
    table("Two places against one, ms", ["", "one", "two", "ratio"], rows)


def _note(what: str, sample: Sample) -> Sample:
    print(what, {name: round(ms, 1) for name, ms in sample.items()}, file=sys.stderr)
    return sample


if __name__ == "__main__":
    main()
