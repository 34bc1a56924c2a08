"""The shipped profiles of engines, made again from the public measurements that they rest on.

Purpose: `engine/latency/profiles/*.json` are made by this script alone. It prints how far each
model is from its points, with the formula and with a table, and writes the files.

Theory: a profile has a latency model of steps, one of puts, and the size of its pool.

- OPT on A100-80G: DistServe publishes coefficients of its formula, not the points. They are taken
  over. It publishes none for OPT-175B, so there is no such profile. One millisecond for each
  pipeline stage comes on top of a prefill, as in its simulator.
- Llama-2-70B and BLOOM-176B on A100 and H100: splitwise-sim publishes times of whole prompts and of
  tokens (columns `prompt_time` and `token_time`, in ms). A token's context is the prompt and half
  of the output. Times are far from linear in the tokens, so the profile is a table. Several prompts
  of the same length take longer on some A100s than one prompt of as many tokens; where both were
  measured, the table has the one prompt. With tp=2, batches of 64 are left out: 32,768 tokens in
  0.8 s would be nine times the peak of two A100s. No chunk was measured after a context; attention
  to that is counted at `ATTENTION` of the devices' peak, as in the microserving paper's Table 3.
- Llama-3.1-8B on RTX 4090 and RTX PRO 6000, Qwen3-32B and Qwen3-30B-A3B on RTX PRO 6000:
  LLMServingSim publishes times of vLLM's kernels. A step is their sum: all layers, embedding, final
  norm, output matrix and sampler. Whole prompts of other lengths than those whose attention was
  measured are in the table too, and in no residual. What two devices exchange is computed, not
  measured (bench/profiles_kernels.py).
- Llama-3.1-8B on A100-40G: the microserving paper, Table 3 and section 4.2. Its prefill times are
  those of 500 new tokens after 500, 2500 and 4500, per layer, times 32 layers. A prompt of 1000
  takes 1.7 times as long as its second half. Four equations determine three coefficients. Decodes
  are not published: see `llama_on_a100`.

Puts: NVLink within a machine for OPT (data sheets); InfiniBand for splitwise's machines, and PCIe
for RTX cards; 30 µs for each layer are those of the microserving paper. Pools: `pool_tokens`.

Run: `python -m bench.profiles --distserve profiler-a100-80g.distserve.json --splitwise
perf_model.csv --llmservingsim profiler/perf [--out engine/latency/profiles]`, with the files from
LLMServe/DistServe (Apache-2.0, simdistserve/estimators/profile_data), Mutinifni/splitwise-sim
(MIT, data) and casys-kaist/LLMServingSim (MIT). Facts are taken over, no code.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.profiles_kernels import KernelTimes, Link
from bench.report import table
from engine.latency import (
    DEVICES,
    MODELS,
    Fit,
    FittedLatency,
    Measured,
    Profile,
    PutLatency,
    Residuals,
    StepWork,
    TableLatency,
    fit_latency,
    pool_tokens,
    residuals,
    tabulate_latency,
    write_profile,
)

PROFILES = Path(__file__).parents[1] / "engine/latency/profiles"
LAYER_S = 29.8e-6  # per layer of a put: microserving, Table 3
NVLINK, A100_NET, H100_NET = 300e9, 25e9, 50e9  # bytes/s in each direction
PCIE4, PCIE5 = 25e9, 50e9  # of 32 and 64 GB/s, what copies reach
LINK = Link(16e9, 20e-6)  # of two RTX PRO 6000, in the configurations beside LLMServingSim's runs
BETWEEN = {  # devices, by tensor- and data-parallel degree
    (1, 1): "",
    (2, 1): "two sums a layer over a link of 16 GB/s and 20 µs, as its configurations say; ",
    (1, 2): "attention data-parallel over two devices that divide the experts and step together "
    "(DP=2, EP=2): the pair is one engine, with two transfers a layer over a link of 16 GB/s and "
    "20 µs, as its configurations say; experts chosen uniformly; ",
}
PEAK = {"a100": 312e12, "h100": 989e12}  # bfloat16 operations per second
ATTENTION = 1 / 3  # of the peak: 2.5e-6 ms per squared token, where the peak would take 0.84e-6
LLAMA = MODELS["llama-3.1-8b"]
Rows = list[list[str]]


def profile(
    name: str, device: str, step: FittedLatency | TableLatency, put: PutLatency, source: str,
    fit: Fit | None, *, tp: int = 1, dp: int = 1, pool: int | None = None,
) -> Profile:  # fmt: skip
    """Return the profile `name@device`, with the pool that fits where none was published."""
    shape = MODELS[name]
    if isinstance(step, TableLatency):
        step = replace(step, rows=short(step.rows), sequences=short(step.sequences))
    return Profile(
        name=f"{name}@{device.removesuffix('-40g')}"
        + (f":tp{tp}" if tp > 1 else f":dp{dp}" if dp > 1 else ""),
        model=name,
        device=device,
        gpus=tp * dp,
        source=source,
        layers=shape.layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        context_length=shape.context_length,
        pool_tokens=pool or pool_tokens(shape, DEVICES[device], tp=tp * dp),
        step=step,
        put=put,
        fit=fit,
    )


def opt(path: Path) -> Iterator[Profile]:
    """OPT on A100-80G, from DistServe's coefficients."""
    for model, degrees in json.loads(path.read_text()).items():
        for tp, public in degrees.items():
            step = FittedLatency(
                tuple(public["prefill"]),
                tuple(public["decoding_smallbs"]),
                tuple(public["decoding_largebs"]),
                public["decoding_large_small_bs_threshold"],
                stage_ms=1.0,
            )
            yield profile(
                model.partition("/")[2], "a100", step, PutLatency(NVLINK, LAYER_S),
                "DistServe's public coefficients for A100-80G (simdistserve, "
                "profiler-a100-80g.distserve.json, Apache-2.0), which come without their points; "
                "pool: DistServe's memory model; puts: NVLink's data sheet, and 30 µs a layer "
                "from the microserving paper", None, tp=int(tp),
            )  # fmt: skip


def splitwise(path: Path, report: Rows) -> Iterator[Profile]:
    """Llama-2-70B and BLOOM-176B on A100 and H100, from splitwise-sim's measured times."""
    steps: dict[tuple[str, str, int], list[Measured]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            device, tp = row["hardware"].removesuffix("-80gb"), int(row["tensor_parallel"])
            tokens, batch = int(row["prompt_size"]), int(row["batch_size"])
            if device not in PEAK or (tp == 2 and batch == 64):
                continue
            context = batch * (tokens + int(row["token_size"]) // 2)
            steps[row["model"], device, tp] += [
                timed(float(row["prompt_time"]), StepWork(tokens * batch, tokens**2 * batch)),
                timed(float(row["token_time"]), StepWork(0, 0, batch, context)),
            ]
    for (model, device, tp), measured in steps.items():
        shape = MODELS[model]
        operations = 2 * shape.layers * shape.heads * shape.head_dim  # per squared token
        square_ms = operations / (tp * PEAK[device] * ATTENTION) * 1e3
        step, fit = tabulate_latency(measured, square_ms=square_ms)
        yield profile(
            model, device, step, PutLatency(A100_NET if device == "a100" else H100_NET, LAYER_S),
            "splitwise-sim's measured times (data/perf_model.csv, MIT), DGX machines; batches of "
            "prompts count as one prompt, which the largest residuals are of; attention to what "
            "stands before a chunk: a third of the device's peak; pool: DistServe's memory "
            "model; puts: InfiniBand's data sheet, and 30 µs a layer from the microserving paper",
            fit, tp=tp,
        )  # fmt: skip
        note(report, f"{model}@{device}:tp{tp}", measured, fit)


def kernels(folder: Path, report: Rows) -> Iterator[Profile]:
    """Models on RTX cards, from LLMServingSim's times of vLLM's kernels."""
    llama, qwen, moe = "llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b"
    pro = "rtx-pro-6000"
    for name, path, device, tp, dp, pool in (
        (llama, "RTX4090/meta-llama/Llama-3.1-8B", "rtx4090", 1, 1, 41408),  # in bench/examples
        (llama, "RTXPRO6000/meta-llama/Llama-3.1-8B", pro, 1, 1, None),
        (qwen, "RTXPRO6000/Qwen/Qwen3-32B", pro, 1, 1, None),
        (qwen, "RTXPRO6000/Qwen/Qwen3-32B", pro, 2, 1, None),
        (moe, "RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507", pro, 1, 1, None),
        (moe, "RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507", pro, 1, 2, None),
    ):
        times = KernelTimes(
            folder / path / f"bf16/tp{tp}", MODELS[name], tp=tp, ranks=dp,
            link=LINK if tp * dp > 1 else None,
        )  # fmt: skip
        measured = list(times.measured_steps())
        mixed = [step for step in measured if step.work.prompt_tokens and step.work.decodes]
        apart = [step for step in measured if not (step.work.prompt_tokens and step.work.decodes)]
        step = tabulate_latency([*apart, *times.whole_prompts()], mixed)[0]
        fit = Fit(
            residuals(step, [each for each in apart if each.work.prompt_tokens]),
            residuals(step, [each for each in apart if each.work.decodes]),
        )
        made = profile(
            name, device, step, PutLatency(PCIE4 if device == "rtx4090" else PCIE5, LAYER_S),
            "LLMServingSim's times of vLLM 0.19's kernels (profiler/perf, MIT), summed over a "
            f"step; {BETWEEN[tp, dp]}pool: "
            f"{'that of its vLLM' if pool else 'DistServe’s memory model'}; puts: PCIe at 80 % of "
            "its data sheet, and 30 µs a layer from the microserving paper", fit, tp=tp, dp=dp,
            pool=pool,
        )  # fmt: skip
        yield made
        note(report, made.name, apart, fit, residuals(step, mixed))


def llama_on_a100(report: Rows) -> Iterator[Profile]:
    """Llama-3.1-8B on A100-40G, from the microserving paper.

    Decodes: a step reads the weights but for the input embeddings, and the KV, at 90 % of the
    memory's bandwidth. A further sequence takes 0.4 of a prompt's token, as in DistServe's public
    coefficients. So 100 tokens after 3000 take 1.1 s, where the paper's figures show more than 1 s.
    """
    shape, device = LLAMA, DEVICES["a100-40g"]
    prompts = [
        Measured(StepWork(500, (start + 500) ** 2 - start**2), 32 * ms / 1e3)
        for start, ms in ((500, 1.247), (2500, 1.391), (4500, 1.564))
    ]
    prompts.append(Measured(StepWork(1000, 1000**2), 1.7 * prompts[0].seconds))
    # Any decodes: the fit of the prompts does not depend on them.
    decodes = [Measured(StepWork(0, 0, b, c), 1e-3 * (b + c)) for b, c in ((1, 1), (1, 2), (2, 2))]
    prefill = fit_latency([*prompts, *decodes])[0].prefill
    reads = shape.weight_bytes - shape.embedding_bytes / 2
    byte_ms = 1e3 / (0.9 * device.bandwidth)
    decode = (reads * byte_ms, shape.kv_bytes_per_token * byte_ms, 0.4 * prefill[1])
    step = FittedLatency(prefill, decode, decode)
    fit = Fit(residuals(step, prompts), Residuals(0, 0.0, 0.0))
    yield profile(
        "llama-3.1-8b", "a100-40g", step, PutLatency(24.45e9, LAYER_S),
        "A System for Microserving of LLMs, Table 3 (500 new tokens after 500, 2500 and 4500, "
        "times 32 layers; puts) and section 4.2 (1000 tokens take 1.7 times their second half); "
        "decodes are not measured but bounded by memory, at 90 % of 1.555 TB/s, with a sequence at "
        "0.4 of a prompt's token as in DistServe's coefficients; pool: DistServe's memory model",
        fit,
    )  # fmt: skip
    report.append(["llama-3.1-8b@a100", "formula", *percents(fit.prefill), "–", "–", "–"])


def note(
    report: Rows, name: str, measured: list[Measured], chosen: Fit, mixed: Residuals | None = None
) -> None:
    """Add the residuals of the formula and of the table to the report."""
    formula = fit_latency(measured)[1]
    for kind, fit in (("formula", formula), ("table", chosen)):
        both = f"{mixed.median:.1%}" if mixed and kind == "table" else "–"
        report.append([name, kind, *percents(fit.prefill), *percents(fit.decode), both])


def timed(ms: float, work: StepWork) -> Measured:
    """Return a step that took some milliseconds."""
    return Measured(work, ms / 1e3)


def short(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Return the points with five digits, which is more than was measured."""
    return tuple((count, float(f"{ms:.5g}")) for count, ms in points)


def percents(errors: Residuals) -> list[str]:
    """Return the median and the largest residual."""
    return [f"{errors.median:.1%}", f"{errors.largest:.1%}"]


def main() -> None:
    """Make all profiles, print their residuals and write them."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("distserve", "splitwise", "llmservingsim"):
        options.add_argument(f"--{name}", type=Path, required=True)
    options.add_argument("--out", type=Path, default=PROFILES)
    given = options.parse_args()
    report: Rows = []
    made = [
        *opt(given.distserve),
        *splitwise(given.splitwise, report),
        *kernels(given.llmservingsim, report),
        *llama_on_a100(report),
    ]
    for each in made:
        write_profile(each, given.out / f"{each.name.replace(':', '_')}.json")
    columns = ["profile", "model", "prefill", "largest", "decode", "largest", "both"]
    table("Residuals, median and largest", columns, report)
    names = [each.name for each in made]
    print(json.dumps({"bench": "profiles", "profiles": names, "residuals": [columns, *report]}))


if __name__ == "__main__":
    main()
