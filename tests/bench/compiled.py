"""Whole training steps under ``torch.compile``: forward, backward and the foreach optimizer."""

import torch

from . import report, steps
from .loops import Case
from .models import NATIVE
from .report import Section
from .steps import Pair

PAIRS = (Pair("O4", "native", 1.02), Pair("O5", "native", 1.02))


def section(device, quick):
    """Compiled steps at O4 and O5 beside compiled native autocast in bfloat16."""
    cases = [
        Case(model, torch.bfloat16, optimizer, device=device, compiled=True)
        for model in list(NATIVE)[: 1 if quick else None]
        for optimizer in ("SGD(foreach)", "AdamW(foreach)")
    ]
    found = steps.measure(cases, PAIRS, *((1, 12) if quick else (3, 12)))
    rows = [*steps.rows_of(found, "native", PAIRS), steps.means_of(found, PAIRS)]
    text = (
        "## Compiled steps\n\n`torch.compile` of a function that makes a whole step, with torch's own compiler;"
        " medians of ratios turn by turn, quartiles in brackets; glibc told to keep freed memory.\n\n"
    )
    text += report.table(["case", "native, ms", *(pair.title for pair in PAIRS)], rows)
    return Section(text, [row for pair in PAIRS for row in steps.verdicts_of(found, pair, "compiled: ")])
