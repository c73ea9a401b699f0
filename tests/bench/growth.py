"""How the cost of a step beside the model, and of ``initialize``, grows with tensors and with parameters."""

import gc
import time

from ampcompat import amp
from tests.internals import reset

from . import own_cost, report
from .report import Section

#: Parameter tensors, of four elements each.
TENSORS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
#: Millions of parameters, in ``COUNT`` tensors.
MILLIONS = (1, 3, 10, 30, 100, 300)
COUNT = 16
STEPS = [name for name in own_cost.VARIANTS if name != "bare"]
NAMES = [*STEPS, "initialize at O1", "initialize at O2"]


def _best_step(make, model, device):
    """Best seconds of a step, in at least three and for at least 0.4 seconds."""
    reset()
    step = make(model)
    for _ in range(8):  # the first steps compare masters by value
        step()
    gc.collect()
    found, end = [], time.perf_counter() + 0.4
    while len(found) < 3 or time.perf_counter() < end:
        found.append(own_cost.timed(step, 1, device))
    return min(found)


def _initialize(level, model):
    """Seconds of one ``initialize``."""
    reset()
    optimizer = own_cost.Idle(model.parameters())
    gc.collect()
    start = time.process_time()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return time.process_time() - start


def _seconds(make_model, device):
    """Seconds of each of ``NAMES`` with the model of ``make_model()``."""
    found = [_best_step(own_cost.VARIANTS[name], make_model(), device) for name in STEPS]
    found += [_initialize(level, make_model()) for level in ("O1", "O2")]
    reset()
    return found


def section(device, quick):
    """The section on growth, with its curves: cost per tensor and per parameter, which should be flat."""
    found = {"tensors": [], "parameters": []}
    _initialize("O1", own_cost.Tensors(1).to(device))  # what only the first call costs
    for count in TENSORS[:-1:2] if quick else TENSORS:
        times = _seconds(lambda count=count: own_cost.Tensors(count).to(device), device)
        found["tensors"].append([count, *(1e9 * t / count for t in times)])
        report.progress(f"growth, {count} tensors")
    for millions in MILLIONS[:4] if quick else MILLIONS:
        elements = millions * 1_000_000 // COUNT
        times = _seconds(lambda elements=elements: own_cost.Tensors(COUNT, elements).to(device), device)
        found["parameters"].append([millions, *(1e6 * t / millions for t in times)])
        report.progress(f"growth, {millions} million parameters")
    text = (
        "## Growth\n\nThe cost beside the model, setting and clearing gradients included: best turns. `initialize`:"
        " one call. Nanoseconds per tensor (four elements each):\n\n"
    )
    text += report.table(["tensors", *NAMES], _rounded(found["tensors"]))
    text += f"\nPicoseconds per parameter, in {COUNT} tensors:\n\n"
    text += report.table(["million parameters", *NAMES], _rounded(found["parameters"]))
    curves = {
        "parameter tensors": ("ns per tensor", _curves(found["tensors"])),
        "million parameters": ("ps per parameter", _curves(found["parameters"])),
    }
    return Section(text, curves=curves)


def _rounded(rows):
    return [[f"{row[0]:,}", *(f"{value:,.0f}" for value in row[1:])] for row in rows]


def _curves(rows):
    sizes, *columns = zip(*rows, strict=True)
    return sizes, dict(zip(NAMES, columns, strict=True))
