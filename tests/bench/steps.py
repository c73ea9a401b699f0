"""Sections on whole training steps, as ratios of variants that take turns."""

import random
from dataclasses import dataclass, field

import torch

from . import hardware, report
from .loops import Case
from .models import LARGE, MODELS, NATIVE
from .report import Section
from .workers import Ratio, Workers


@dataclass(frozen=True)
class Pair:
    """Two variants that are compared, and the limits on the geometric mean over the cases and on the worst case."""

    ours: str
    theirs: str
    mean: float | None = None
    worst: float | None = None

    @property
    def title(self):
        return f"{self.ours} / {self.theirs}"


@dataclass
class Measured:
    """What came of cases: seconds per step by case and variant, counts, and the ratios of pairs by case."""

    times: dict = field(default_factory=dict)
    counts: dict = field(default_factory=dict)
    ratios: dict = field(default_factory=dict)

    def medians(self, pair):
        return [ratio.median for ratio in self.ratios[pair].values()]


def measure(cases, pairs, rounds, turns, keeps=True, peaks=False):
    """Measure ``cases`` in new processes again and again, for each process has its luck."""
    variants = list(dict.fromkeys(name for pair in pairs for name in (pair.theirs, pair.ours)))
    found = Measured(ratios={pair: {} for pair in pairs})
    for at in range(rounds):
        with Workers(variants, keeps) as workers:
            for case in random.sample(cases, len(cases)):
                times, found.counts[case] = workers.measure(
                    case, turns, count=at == rounds - 1, peaks=peaks and case.optimizer == "AdamW"
                )
                earlier = found.times.get(case, {})
                times = found.times[case] = {name: earlier.get(name, []) + times[name] for name in times}
                for pair in pairs:
                    if pair.ours in times and pair.theirs in times:
                        found.ratios[pair][case] = Ratio.of(times[pair.ours], times[pair.theirs])
                now = ", ".join(f"{pair.title} {found.ratios[pair].get(case)}" for pair in pairs)
                report.progress(f"{case.title}, {at + 1} of {rounds}: {now}")
    for by_case in (found.times, found.counts, *found.ratios.values()):  # the page has them in order
        ordered = {case: by_case.pop(case) for case in cases if case in by_case}
        by_case.update(ordered)
    return found


def _rounds_and_turns(device, quick):
    """Rounds of new processes, and turns in each: on a CPU many rounds, for where memory lies decides more there."""
    if quick:
        return 1, 8
    return (6, 6) if device == "cpu" else (2, 8)


def _cell(found, pair, case):
    if case in found.ratios[pair]:
        return found.ratios[pair][case]
    return next(found.counts[case][v]["error"][:60] for v in (pair.ours, pair.theirs) if v not in found.times[case])


def verdicts_of(found, pair, more=""):
    """Rows of the summary for a pair that has limits."""
    medians, rows = found.medians(pair), []
    if pair.mean and medians:
        mean = report.geometric_mean(medians)
        rows.append([f"{more}{pair.title}, geometric mean", *report.verdict(mean, pair.mean)])
    if pair.worst and medians:
        rows.append([f"{more}{pair.title}, worst case", *report.verdict(max(medians), pair.worst)])
    return rows


def rows_of(found, base, pairs):
    """A row for each case: its title, the best milliseconds of variant ``base``, and the ratios of ``pairs``."""
    for case, times in found.times.items():
        cells = [_cell(found, pair, case) for pair in pairs]
        yield [case.title, f"{1e3 * min(times[base]):.2f}" if base in times else "", *cells]


def means_of(found, pairs):
    """The row of geometric means below those of ``rows_of``."""
    return ["geometric mean", "", *(f"**{report.geometric_mean(found.medians(pair)):.3f}**" for pair in pairs)]


# -- native ------------------------------------------------------------------------------------------------------------
#: By dtype: what is compared where its arithmetic is native. The hand-written loop has the model in the half dtype and
#: float32 masters; it accumulates gradients in half, or in float32 as O2 and O5 do.
PAIRS = {
    torch.bfloat16: (
        Pair("O4", "native", 1.02, 1.05),
        Pair("O5", "hand-written masters", 1.00, 1.04),
        Pair("O5", "hand-written, float32 sums", 1.00),
        Pair("O5", "native", 1.00),
        Pair("native", "fp32"),
    ),
    torch.float16: (
        Pair("O1", "native", 1.03, 1.10),
        Pair("O2", "hand-written masters", 1.00),
        Pair("O2", "native"),
        Pair("native", "fp32"),
    ),
}
ALLOCATORS = {"glibc as it is": False, "glibc told to keep freed memory": True}


def native(device, quick):
    """Steps in bfloat16 where the hardware computes in it: what a user of such hardware should expect."""
    text = (
        "## Native bfloat16\n\nOne thread; each variant in a process of its own; medians of ratios turn by turn,"
        " quartiles in brackets; milliseconds are float32's best turn. glibc gives freed memory back to the system"
        " unless told otherwise (`MALLOC_TRIM_THRESHOLD_` and others), and every page of it costs a fault at its next"
        " use; on a GPU, torch's allocator keeps it.\n\n"
    )
    return _native_in(torch.bfloat16, Section(text), device, quick)


def native16(device, quick):
    """The same in float16, with loss scaling."""
    return _native_in(torch.float16, Section("## Native float16\n\n"), device, quick)


def _native_in(dtype, section, device, quick):
    """Add tables and verdicts of one dtype to ``section``."""
    if dtype not in hardware.native_halves(device):
        section.text += "This processor computes in it by way of float32: nothing measured.\n"
        return section
    name, pairs = str(dtype).removeprefix("torch."), PAIRS[dtype]
    cases = [
        Case(model, dtype, optimizer, accumulated, device=device)
        for model in NATIVE
        for optimizer in ("SGD", "AdamW")
        for accumulated in (False, True)
        # What loss scaling adds, half of the cases show.
        if dtype == torch.bfloat16 or accumulated == (optimizer == "SGD")
    ]
    rounds, turns = _rounds_and_turns(device, quick)
    for title, keeps in ALLOCATORS.items():
        if keeps and (dtype != torch.bfloat16 or device != "cpu"):
            continue
        peaks = dtype == torch.bfloat16 and not keeps and device == "cpu"
        found = measure(cases, pairs, rounds, turns, keeps, peaks)
        rows = [*rows_of(found, "fp32", pairs), means_of(found, pairs)]
        heads = ["case", "fp32, ms", *(pair.title for pair in pairs)]
        section.text += f"### {name}, {title}\n\n" + report.table(heads, rows) + "\n"
        if not keeps:
            for pair in pairs:
                section.summary += verdicts_of(found, pair, f"native {name}: ")
                if pair.mean:
                    section.bars += [(f"{pair.title}: {c.title}", r) for c, r in found.ratios[pair].items()]
        if peaks:
            section.text += _memory(found, pairs)
    return section


def _memory(found, pairs):
    names, rows = list(dict.fromkeys(n for p in pairs for n in (p.theirs, p.ours))), []
    for case, counts in found.counts.items():
        cells = [
            (counts[n]["peak bytes"] / 2**20, counts[n]["page faults"]) for n in names if "peak bytes" in counts[n]
        ]
        rows += [[case.title, *(f"{peak:.1f}; {faults:,}" for peak, faults in cells)]] if cells else []
    head = "Most MiB that torch's allocator held in a step, weights and optimizer state included; page faults:\n\n"
    return head + report.table(["case", *names], rows) + "\n"


# -- emulated, and GPUs ------------------------------------------------------------------------------------------------
SHOWN = (
    Pair("O0", "fp32", 1.01),
    Pair("O1", "native, same casts", 1.03, 1.10),
    Pair("O2", "hand-written masters", 1.00),
    Pair("O2", "hand-written, float32 sums", 1.00),
    Pair("fp32 again", "fp32"),
)
ON_A_GPU = (*SHOWN, Pair("O1", "native"), Pair("O2", "native"), Pair("O3", "fp32"), Pair("native", "fp32"))


def _few(device):
    """A case of each model, and one each of bfloat16, accumulation, SGD and clipping."""
    for model in MODELS:
        if model not in LARGE:
            yield Case(model, torch.float16, "AdamW", device=device)
    yield Case("MLP", torch.bfloat16, "SGD", accumulated=True, device=device)
    yield Case("transformer", torch.float16, "AdamW(fused)", clipped=True, device=device)


def _all(device):
    """Every model with every optimizer, in bfloat16, accumulated, and clipped."""
    for model in MODELS:
        if model in LARGE:
            yield Case(model, torch.float16, "AdamW(fused)", device=device)
            continue
        for optimizer in ("AdamW", "SGD", "AdamW(fused)"):
            yield Case(model, torch.float16, optimizer, device=device)
        yield Case(model, torch.bfloat16, "AdamW", device=device)
        yield Case(model, torch.float16, "AdamW", accumulated=True, device=device)
        yield Case(model, torch.float16, "AdamW", clipped=True, device=device)


def small(device, quick):
    """Steps of small models of every kind, mostly in float16, which few CPUs have: what is added to the kernels."""
    on_gpu = device != "cpu"
    pairs = ON_A_GPU if on_gpu else SHOWN
    cases = list(_all(device) if on_gpu and not quick else _few(device))
    found = measure(cases, pairs, *_rounds_and_turns(device, quick))
    rows = []
    for row, times in zip(rows_of(found, "fp32", pairs), found.times.values(), strict=True):
        rows.append([*row[:2], *(_microseconds(times, pair) for pair in SHOWN[:3]), *row[2:]])
    heads = ["case", "fp32, ms (best)", *(f"{p.ours} − {p.theirs}, µs" for p in SHOWN[:3]), *(p.title for p in pairs)]
    text = (
        "## Small models of every kind\n\nDifferences of the best turns; medians of ratios turn by turn, quartiles in"
        " brackets; glibc told to keep freed memory. Where float16 is emulated, products take most of a step: the"
        " ratios show that nothing is lost, and no speed.\n\n"
    )
    text += report.table(heads, rows) + "\n## Counts per step\n\n" + _counts(found)
    summary = [row for pair in SHOWN for row in verdicts_of(found, pair)]
    again = report.geometric_mean(found.medians(SHOWN[-1]))
    summary.append(["fp32 / fp32, in two processes, geometric mean", f"{again:.3f}", "1", "what cannot be resolved"])
    if on_gpu:
        summary += _large(found) + _peaks(found)
    bars = [(f"{pair.title}: {case.title}", r) for pair in SHOWN[:3] for case, r in found.ratios[pair].items()]
    return Section(text, summary, bars)


# -- beside the original -----------------------------------------------------------------------------------------------
BESIDE = tuple(Pair(level, f"apex {level}") for level in ("O0", "O1", "O2", "O3"))
BESIDE += (Pair("O1", "native"), Pair("O2", "hand-written masters"))


def original(device, quick):
    """Steps of the original and of ampcompat, each variant and each case in a process of its own."""
    cases = [
        Case("BERT-base-like", torch.float16, "AdamW", device=device),
        Case("ResNet-50-like", torch.float16, "SGD", device=device),
        Case("many small", torch.float16, "AdamW", device=device),
    ]
    found = Measured(ratios={pair: {} for pair in BESIDE})
    for case in cases:  # the original wraps torch's functions once more with each initialize at O1
        one = measure([case], BESIDE, *_rounds_and_turns(device, quick))
        found.times |= one.times
        found.counts |= one.counts
        for pair in BESIDE:
            found.ratios[pair] |= one.ratios[pair]
    text = (
        "## Beside the original\n\nMedians of ratios turn by turn, quartiles in brackets; milliseconds are native's"
        " best turn.\n\n"
    )
    heads = ["case", "native, ms", *(pair.title for pair in BESIDE)]
    text += report.table(heads, [*rows_of(found, "native", BESIDE), means_of(found, BESIDE)])
    return Section(text + "\n### Counts per step\n\n" + _counts(found))


def _counts(found):
    rows, names = [], []
    for case, counts in found.counts.items():
        for variant, count in counts.items():
            if "error" not in count:
                rows.append([case.title, variant, *count.values()])
                names = list(count)
    return report.table(["case", "variant", *names], rows)


def _microseconds(times, pair):
    if pair.ours not in times or pair.theirs not in times:
        return ""
    return f"{1e6 * (min(times[pair.ours]) - min(times[pair.theirs])):+.0f}"


def _large(found):
    """Rows of the summary for the models of ResNet-50's and BERT-base's size."""
    rows, (o1, o2) = [], ON_A_GPU[5:7]
    for case, ratio in found.ratios[o1].items():
        if case.model in LARGE:
            rows.append([f"{case.model}: {o1.title}", *report.verdict(ratio.median, 1.02)])
            if case.model == "BERT-base-like" and case in found.ratios[o2]:
                verdict = report.verdict(found.ratios[o2][case].median, 1 / 1.15)
                rows.append([f"{case.model}: {o2.title}", *verdict])
    return rows


def _peaks(found):
    """Rows of the summary for the peak memory of a step: its worst case at O1, and BERT's at O2."""
    peaks = {
        case: {variant: count["peak bytes"] for variant, count in counted.items() if "peak bytes" in count}
        for case, counted in found.counts.items()
    }
    at_o1 = [peak["O1"] / peak["native"] for peak in peaks.values() if "O1" in peak and "native" in peak]
    rows = [["O1 / native, peak bytes, worst case", *report.verdict(max(at_o1), 1.0)]] if at_o1 else []
    for case, peak in peaks.items():
        if case.model == "BERT-base-like" and "O2" in peak and "native" in peak:
            rows.append([f"{case.model}: O2 / native, peak bytes", *report.verdict(peak["O2"] / peak["native"], 1.0)])
    return rows
