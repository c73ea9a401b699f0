"""``python -m tests.bench [--quick] [--device cuda]``: measure, and write ``docs/benchmarks/<hardware>.md``."""

import argparse
import datetime
import os
import sys
from pathlib import Path

import torch

from . import footprint, optimizers, own_cost, report, rules
from .loops import OPTIMIZERS, Case
from .models import LARGE, MODELS
from .workers import KEEP_MEMORY, Ratio, Workers

#: What each level is compared with, and the limit on the geometric mean over the models and on the worst.
PAIRS = (
    ("O0", "fp32", 1.01, None),
    ("O1", "native, same casts", 1.03, 1.10),
    ("O2", "hand-written masters", 1.00, None),
)
WIDTHS = {"3 million parameters": 512, "13 million parameters": 1024}
SHOWN = (
    *((ours, theirs) for ours, theirs, *_ in PAIRS),
    ("fp32 again", "fp32"),
    ("O1", "native"),
    ("O2", "native"),
    ("O3", "fp32"),
    ("native", "fp32"),
)


def cases(device, quick):
    """Every model with every optimizer, in bfloat16, accumulated, and clipped; a few when quick."""
    for model in MODELS:
        if model in LARGE:
            if device != "cpu":
                yield Case(model, torch.float16, "AdamW(fused)", device=device)
            continue
        yield Case(model, torch.float16, "AdamW", device=device)
        if not quick:
            yield Case(model, torch.float16, "SGD", device=device)
            yield Case(model, torch.float16, "AdamW(fused)", device=device)
            yield Case(model, torch.bfloat16, "AdamW", device=device)
            yield Case(model, torch.float16, "AdamW", accumulated=True, device=device)
            yield Case(model, torch.float16, "AdamW", clipped=True, device=device)
    if quick:
        yield Case("MLP", torch.bfloat16, "SGD", accumulated=True, device=device)
        yield Case("transformer", torch.float16, "AdamW(fused)", clipped=True, device=device)


def step_times(device, quick):
    """Sections on whole steps."""
    rows, counts, ratios = [], [], {pair: {} for pair in SHOWN}
    found = _times(device, quick)
    for case, (times, counted) in found.items():
        cells = []
        for ours, theirs in SHOWN:
            if ours in times and theirs in times:
                ratios[ours, theirs][case] = Ratio.of(times[ours], times[theirs])
                cells.append(ratios[ours, theirs][case])
            else:
                cells.append(next(counted[v]["error"][:60] for v in (ours, theirs) if v not in times))
        more = [_microseconds(times, ours, theirs) for ours, theirs, *_ in PAIRS]
        rows.append([case.title, f"{1e3 * min(times['fp32']):.2f}", *more, *cells])
        for variant, count in counted.items():
            if "error" not in count:
                counts.append([case.title, variant, *count.values()])
                names = list(count)
    summary = []
    for ours, theirs, mean, worst in PAIRS:
        medians = [ratio.median for ratio in ratios[ours, theirs].values()]
        summary.append([f"{ours} / {theirs}, geometric mean", *report.verdict(report.geometric_mean(medians), mean)])
        if worst:
            summary.append([f"{ours} / {theirs}, worst case", *report.verdict(max(medians), worst)])
    for case in ratios["O1", "native"]:
        if case.model in LARGE:
            o1, o2 = ratios["O1", "native"][case], ratios["O2", "native"].get(case)
            summary.append([f"{case.model}: O1 / native", *report.verdict(o1.median, 1.02)])
            if case.model == "BERT-base-like" and o2 is not None:
                summary.append([f"{case.model}: O2 / native", *report.verdict(o2.median, 1 / 1.15)])
    summary += _peaks({case: counted for case, (_, counted) in found.items()})
    again = report.geometric_mean(ratio.median for ratio in ratios["fp32 again", "fp32"].values())
    summary.append(["fp32 / fp32, in two processes, geometric mean", f"{again:.3f}", "1", "what cannot be resolved"])
    more = (f"{ours} − {theirs}, µs" for ours, theirs, *_ in PAIRS)
    heads = ["case", "fp32, ms (best)", *more, *(f"{ours} / {theirs}" for ours, theirs in SHOWN)]
    text = "## Step time\n\nDifferences of the best turns; medians of ratios turn by turn, quartiles in brackets.\n\n"
    text += report.table(heads, rows)
    text += "\n## Counts per step\n\n" + report.table(["case", "variant", *names], counts)
    bars = [(f"{ours} / {theirs}: {c.title}", r) for ours, theirs, *_ in PAIRS for c, r in ratios[ours, theirs].items()]
    return text, summary, bars


def _times(device, quick):
    """By case: seconds per step, by variant, and counts; from new processes again and again, for each has its luck."""
    found = {}
    for repeat in range(1 if quick else 3):
        with Workers() as workers:
            for case in cases(device, quick):
                times, counted = workers.measure(case, turns=12 if device == "cpu" and not quick else 6)
                earlier, _ = found.get(case, ({}, None))
                found[case] = {name: earlier.get(name, []) + times[name] for name in times}, counted
                report.progress(f"{case.title}, {repeat + 1}")
    return found


def _peaks(counts):
    """Summary of the peak memory of a step, which is counted on CUDA: its worst case at O1, and BERT's at O2."""
    peaks = {
        case: {variant: count["peak bytes"] for variant, count in counted.items() if "peak bytes" in count}
        for case, counted in counts.items()
    }
    at_o1 = [peak["O1"] / peak["native"] for peak in peaks.values() if "O1" in peak and "native" in peak]
    rows = [["O1 / native, peak bytes, worst case", *report.verdict(max(at_o1), 1.0)]] if at_o1 else []
    for case, peak in peaks.items():
        if case.model == "BERT-base-like" and "O2" in peak and "native" in peak:
            rows.append([f"{case.model}: O2 / native, peak bytes", *report.verdict(peak["O2"] / peak["native"], 1.0)])
    return rows


def _microseconds(times, ours, theirs):
    return f"{1e6 * (min(times[ours]) - min(times[theirs])):+.0f}" if ours in times and theirs in times else ""


def own_costs(device, quick):
    """Section on the cost beside the model."""
    rows, ops, summary = [], [], []
    for row in own_cost.measure(device, quick):
        pairs = ("O1 / GradScaler", "O2 / hand-written masters")
        times = [f"{value:.0f}" for value in row["microseconds"].values()]
        report.progress(f"own cost, {row['size']} tensors: {row['O1 / GradScaler'][0]:.2f}")
        rows.append([row["size"], *times, *(f"{row[p][0]:.2f}; {row[p][1]}" for p in pairs)])
        ops += [[row["size"], *row["ops"].values()]] if row["ops"] else []
        names, counted = list(row["microseconds"]), ["bare", *row["microseconds"]]
        summary.append(
            [f"own cost, {row['size']} tensors: O1 / GradScaler", *report.verdict(row["O1 / GradScaler"][0], 1.2)]
        )
    text = (
        "## The cost of a step beside the model\n\nMicroseconds beyond setting and clearing the gradients: best turns;"
    )
    text += " ratios of the best turns, then medians of ratios and quartiles.\n\n"
    text += report.table(["parameter tensors", *(f"{name}, µs" for name in names), *pairs], rows)
    return text + "\nDispatcher calls:\n\n" + report.table(["parameter tensors", *counted], ops), summary


def footprints(device, quick):
    """Section on memory and on what happens once; measured on the CPU, FusedAdam on ``device``."""
    memory = []
    for name in ("AdamW(fused)", "AdamW"):
        for accumulated in (False, True):
            found = footprint.bytes_per_parameter(OPTIMIZERS[name], accumulated)
            memory.append([name, accumulated, *(f"{value:.2f}" for value in found.values())])
            report.progress(f"memory: {memory[-1]}")
    imports = footprint.import_seconds(3 if quick else 9)
    initialize = {size: footprint.initialize_ratio(5 if quick else 20, width) for size, width in WIDTHS.items()}
    saved = footprint.state_dict_ratio(5 if quick else 20)
    fused = optimizers.fused_adam_ratio(10 if quick else 30, device)
    report.progress(f"import: {imports}, initialize: {initialize}, state_dict: {saved}, FusedAdam: {fused}")
    torch_alone, both = imports.values()
    summary = [
        ["O2 with AdamW(fused), bytes per parameter, optimizer's peak", *report.verdict(float(memory[0][3]), 18.5)],
        ["import torch, ampcompat / import torch", *report.verdict(both / torch_alone, 1.05)],
        ["FusedAdam at O2 / AdamW(fused) and copies by hand", *report.verdict(fused.median, 1.0)],
        *(
            [f"initialize at O2 / masters cloned and the model cast by hand, {size}", *report.verdict(ours / hand, 1.5)]
            for size, (ours, hand) in initialize.items()
        ),
        ["state_dict at O2 / plain torch's plus one copy", *report.verdict(saved[0] / saved[1], 1.0)],
    ]
    text = (
        "## Memory at O2\n\nPeak bytes per parameter: 2 half weights, 4 masters, 8 moments, 4 master gradients, and 2"
    )
    text += " half gradients until the step.\n\n"
    text += report.table(["optimizer", "accumulated", "leaving the block", "optimizer"], memory)
    return text, summary


def rule_costs(quick):
    """Section on single ops; measured on the CPU."""
    rows = [
        [name, f"{native:.2f}", f"{ours:.2f}", f"{ours - native:+.2f}"] for name, native, ours in rules.per_op(quick)
    ]
    text = "## Cost of a rule per op\n\nBest microseconds of tiny ops in float16 autocast on the CPU.\n\n"
    text += report.table(["kind: op", "native autocast", "O1", "difference"], rows)
    text += "\n## float16 convolutions on the CPU\n\nA training step of one convolution, over float32's.\n\n"
    cells = [[name, ratio if isinstance(ratio, Ratio) else f"{ratio:.1f}"] for name, ratio in rules.convolution(quick)]
    return text + report.table(["", "ratio"], cells)


def main():
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("--quick", action="store_true", help="fewer cases and turns")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_MEMORY})
    torch.set_num_threads(1)
    name, sentence = report.hardware(given.device)
    own, own_summary = own_costs(given.device, given.quick)
    once, once_summary = footprints(given.device, given.quick)
    ops = rule_costs(given.quick)
    steps, summary, bars = step_times(given.device, given.quick)
    report.progress("done")
    given.out.mkdir(parents=True, exist_ok=True)
    command = "python -m tests.bench" + " --quick" * given.quick + f" --device {given.device}"
    head = f"# Benchmarks: {name}\n\n{sentence}. torch {torch.__version__}, Python {sys.version.split()[0]}."
    head += f" {datetime.date.today()}, `{command}`. Variants take turns in one run; compare ratios, not times."
    head += f" Load average over the run's last 15 minutes: {os.getloadavg()[2]:.1f}.\n\n"
    if given.device == "cpu":
        head += "GPU rows: not measured. The same command measures them on a machine with one.\n\n"
    head += "## Summary\n\n" + report.table(["what", "measured", "aim", ""], [*summary, *own_summary, *once_summary])
    drawn = report.plot(given.out / f"{name}.svg", bars)
    picture = f"\n![Step time ratios]({name}.svg)\n" if drawn else ""
    (given.out / f"{name}.md").write_text("\n".join([head + picture, steps, own, once, ops]))


if __name__ == "__main__":
    main()
