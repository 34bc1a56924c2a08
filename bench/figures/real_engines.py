"""Microserving's figures on real engines: claims about what the benches have measured on CPUs.

Nothing runs here. The numbers come from the newest results of `bench-balance`, `bench-disagg`,
`bench-layers` and `bench-receiving` in `bench/results/`. Their docstrings say what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from bench.figures.claims import Answer, Claim, Part, by_effect, by_places
from bench.figures.page import RESULTS

__all__ = ["moves", "under_load"]

DP, P1D1, BALANCE, AUTO = "data parallel", "1P1D", "balanced 0.2", "balanced auto"
SETTINGS = {
    "real, no pacing": "unpaced",
    "real, our default": "paced",
}  # the arms of `bench-balance`
TABLE_3 = {1000: 15.8, 3000: 38.3, 5000: 55.4}
Rates = Mapping[str, Mapping[str, Any]]  # what was measured at each rate, by strategy


def newest(bench: str, part: str, key: str = "") -> Any:
    """Return a part of the newest result of a bench that has it.

    Raises `FileNotFoundError` if there is none.
    """
    found = []
    for path in RESULTS.glob(f"{bench}*.json"):
        document = json.loads(path.read_text())
        value = document.get(part)
        real = document["bench"] == bench and "--mock" not in document["command"]
        if real and value is not None and (not key or key in value):
            found.append((document["date"], value[key] if key else value))
    if not found:
        raise FileNotFoundError(f"no result of bench-{bench} has {part} {key}".rstrip())
    return max(found, key=lambda each: each[0])[1]


def under_load() -> Part:
    """Figures 10 and 11, scaled to SmolLM2 on a core for each engine."""
    results = {"11": newest("balance", "results", "11")}
    claims = _figure_11(results["11"])
    try:
        results["10"] = newest("balance", "results", "10")
    except FileNotFoundError:
        pass  # `--figure 11` measures one of them
    else:
        claims += _figure_10(results["10"])
    rows = []
    for figure, by_rate in results.items():
        for rate, arms in by_rate.items():
            for arm, strategies in arms.items():
                for name, one in strategies.items():
                    ratios = one["over_data_parallel"]
                    rows.append({
                        "figure": figure, "rate per engine": rate, "engines": arm, "strategy": name,
                        "mean JCT (ms)": round(one["jct_mean_ms"]["median"]),
                        "P99 JCT (ms)": round(one["jct_p99_ms"]["median"]),
                        "mean TTFT (ms)": round(one["ttft_mean_ms"]["median"]),
                        "mean TPOT (ms)": one["tpot_mean_ms"]["median"],
                        "mean over data parallel's": _spread(ratios["mean"]),
                        "P99 over data parallel's": _spread(ratios["p99"]),
                    })  # fmt: skip
    return Part({"rows": rows}, claims)


def _by_setting(by_rate: Mapping[str, Any]) -> dict[str, Rates]:
    return {
        name: {rate: arms[arm] for rate, arms in by_rate.items()} for name, arm in SETTINGS.items()
    }


def _figure_11(by_rate: Mapping[str, Any]) -> list[Claim]:
    settings = {
        name: {r: arms[arm] for r, arms in by_rate.items()} for name, arm in SETTINGS.items()
    }
    top, before = list(by_rate)[-1], list(by_rate)[-2]

    def each(answer: Callable[[Rates], Answer]) -> dict[str, Answer]:
        return {name: answer(rates) for name, rates in settings.items()}

    def gain(strategy: str, of: str, paper: float) -> dict[str, Answer]:
        def answer(rates: Rates) -> Answer:
            ratios = {r: one[strategy]["over_data_parallel"][of] for r, one in rates.items()}
            rate, ratio = min(ratios.items(), key=lambda one: one[1]["median"])
            low, high = ratio["min"] - 1, ratio["max"] - 1
            return Answer(
                f"{ratio['median'] - 1:+.0%} ({low:+.0%} to {high:+.0%}) at {rate}".replace(
                    "-", "−"
                ),
                by_effect(paper, ratio["median"] - 1),
            )

        return each(answer)

    def tpot(rates: Rates) -> Answer:
        ratios = [
            one[name]["tpot_mean_ms"]["median"] / one[DP]["tpot_mean_ms"]["median"]
            for one in rates.values()
            for name in (P1D1, BALANCE)
        ]
        return Answer(f"{min(ratios):.2f}–{max(ratios):.2f}", by_places(r < 0.98 for r in ratios))

    def reversal(rates: Rates) -> Answer:
        means = [rates[r][P1D1]["over_data_parallel"]["mean"]["median"] for r in (before, top)]
        ttft = [rates[r][P1D1]["ttft_mean_ms"]["median"] for r in (before, top)]
        text = f"mean {means[0] - 1:+.0%} → {means[1] - 1:+.0%}; TTFT × {ttft[1] / ttft[0]:.1f}"
        places = [means[1] > means[0], ttft[1] > 1.5 * ttft[0]]
        return Answer(text.replace("-", "−"), by_places(places))

    def kept(rates: Rates) -> Answer:
        ratio = rates[top][BALANCE]["over_data_parallel"]["mean"]["median"]
        mine, theirs = (rates[top][name]["jct_mean_ms"]["median"] for name in (BALANCE, P1D1))
        text = f"mean {ratio - 1:+.0%} of data parallel, {mine / theirs - 1:+.0%} of 1P1D"
        places = [ratio < 0.98, mine / theirs < 0.98]
        return Answer(text.replace("-", "−"), by_places(places))

    why = "The best rate, its median over three repeats, and their spread."
    return [
        Claim("Figure 11", "1P1D: mean JCT up to 21 % below data parallel",
              gain(P1D1, "mean", -0.21), why),
        Claim("Figure 11", "1P1D-balance (0.2): mean JCT up to 21 % below data parallel",
              gain(BALANCE, "mean", -0.21), why),
        Claim("Figure 11", "1P1D: P99 JCT up to 47 % below data parallel",
              gain(P1D1, "p99", -0.47), f"{why} P99 is nearly the largest of a run."),
        Claim("Figure 11", "1P1D-balance (0.2): P99 JCT up to 47 % below data parallel",
              gain(BALANCE, "p99", -0.47), why),
        Claim("Figure 11", "TPOT is much lower than data parallel's (mean, over data parallel's)",
              each(tpot), "1P1D and balance, at every rate."),
        Claim("Figure 11", "1P1D degrades at the highest rate, through TTFT (against data "
              f"parallel, from {before} to {top})", each(reversal),
              "The highest rate is 95 % of what the prefill engine can do. Data parallel is near "
              "its own limit there too."),
        Claim("Figure 11", "there 1P1D-balance keeps a low JCT", each(kept),
              "A core that decodes has little time left for prefills: what it takes over delays "
              "its decodes."),
    ]  # fmt: skip


def _figure_10(by_rate: Mapping[str, Any]) -> list[Claim]:
    settings = {
        name: {r: arms[arm] for r, arms in by_rate.items()} for name, arm in SETTINGS.items()
    }

    def stronger(rates: Rates) -> Answer:
        ratios = [
            one[name]["over_data_parallel"]["mean"]["median"]
            for one in rates.values()
            for name in (P1D1, BALANCE)
        ]
        return Answer(f"{min(ratios):.2f}–{max(ratios):.2f}", by_places(r >= 0.98 for r in ratios))

    def weaker(rates: Rates) -> Answer:
        ratios = [
            one[BALANCE]["jct_mean_ms"]["median"] / one[P1D1]["jct_mean_ms"]["median"]
            for one in rates.values()
        ]
        return Answer(f"{min(ratios):.2f}–{max(ratios):.2f}", by_places(r > 1 for r in ratios))

    return [
        Claim("Figure 10", "data parallel stays strong; 1P1D and balance bring no benefit (mean "
              "JCT over data parallel's)",
              {name: stronger(rates) for name, rates in settings.items()}, "At every rate."),
        Claim("Figure 10", "1P1D-balance is worse than 1P1D (mean JCT over 1P1D's)",
              {name: weaker(rates) for name, rates in settings.items()}, "At every rate."),
    ]  # fmt: skip


def moves() -> Part:
    """Figure 12, Table 3 and §3.6 on two engines."""
    owner = newest("disagg", "owner_vs_recompute")
    times = newest("disagg", "ms")["move"]
    layers = newest("layers", "layers")
    phases = newest("receiving", "phases")
    growth = [times[n]["owner"]["median"] for n in ("1000", "5000")]
    whole = [times[n]["recompute"]["median"] for n in ("1000", "3000", "5000")]

    def shares(kind: str) -> list[float]:
        return [
            100 * one[kind]["median"] / one["compute_ms"]["median"]
            for one in layers.values()
            if kind in one
        ]

    puts_share, nixl = shares("put_ms"), shares("nixl_ms")
    hidden = [one["hidden"]["median"] for one in layers.values()]
    close = [
        abs(share - paper) <= 0.25 * paper
        for share, paper in zip(puts_share, TABLE_3.values(), strict=True)
    ]
    puts, receives = phases["puts"], phases["receives"]
    claims = [
        Claim("Figure 12", "1000 tokens, 500 of them cached on the sender: 1.7× faster",
              {"real": Answer(f"{owner['1000']:.2f}× ({owner['3000']:.1f}×, {owner['5000']:.1f}× "
                              "at 3000, 5000)", by_effect(0.7, owner["1000"] - 1))},
              "The paper's flow: the owner of the context computes the new part and sends all, the "
              "other engine generates. To the first token."),
        Claim("Figure 12", "“only a slight increase” with the context, from 1000 to 5000 tokens",
              {"real": Answer(f"{growth[0]:.0f} → {growth[1]:.0f} ms",
                              by_places([growth[1] < 1.35 * growth[0]]))},
              "Counted as slight: below 35 %. Attention over the context takes a larger share of a "
              "small model's step."),
        Claim("Figure 12", "without migration it grows linearly",
              {"real": Answer(" → ".join(f"{ms:.0f}" for ms in whole) + " ms",
                              by_places([whole[2] - whole[1] > 0.8 * (whole[1] - whole[0])]))},
              "1000, 3000 and 5000 tokens."),
        Claim("Table 3", "putting takes 15.8 / 38.3 / 55.4 % of computing, per layer",
              {"real": Answer(" / ".join(f"{share:.1f}" for share in puts_share) + " %"
                              + (" (over NIXL " + " / ".join(f"{share:.1f}" for share in nixl)
                                 + " %)" if nixl else ""), by_places(close))},
              "SmolLM2 in bfloat16 over shared memory. A core computes slowly and copies fast."),
        Claim("Table 3", "the transfers are hidden behind the computation",
              {"real": Answer(" / ".join(f"{share:.0%}" for share in hidden),
                              by_places(share > 0.8 for share in hidden))},
              "Share of a send's time with everything cached that a computing send hides."),
        Claim("§3.6", "a transfer does not affect the ongoing requests of the receiver",
              {"real": Answer(
                  f"TPOT × {_p50(receives):.2f} (P99 × {_p99(receives):.2f}) with prompts that the "
                  f"sender computes, × {_p50(puts):.2f} (× {_p99(puts):.2f}) with cached ones",
                  by_places(r < 1.05 for one in (receives, puts) for r in (_p50(one), _p99(one))),
              )},
              "16 decodes on the receiver. Prompts of 3000 tokens, one after the other; calls "
              f"included. The cached ones arrive at {puts['put_mb_per_s']['median'] / 1000:.1f} "
              "GB/s, through the memory that the decodes need too. Counted as none: below 5 %."),
    ]  # fmt: skip
    return Part({"layers": layers, "phases": phases, "times": times}, claims)


def _p50(phase: Mapping[str, Any]) -> float:
    ratio: float = phase["tpot_p50"]["median"]
    return ratio


def _p99(phase: Mapping[str, Any]) -> float:
    ratio: float = phase["tpot_p99"]["median"]
    return ratio


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})"
