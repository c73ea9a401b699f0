"""``python -m tests.bench.budget``: what a steady step launches, on emulated CUDA devices, as tables for the page.

Counts, which depend on no machine: kernels, launches, host syncs and bytes. They say nothing about time.
"""

import gc
import sys

import torch

from tests.accelerator import emulated_cuda
from tests.accelerator.emulated_cuda import Log
from tests.accelerator.steady_steps import OPTIMIZERS, VARIANTS, Case, residual, warmed_up
from tests.internals import reset

from . import report
from .models import Conv, Transformer, resnet

COUNTS = "kernels, launches, syncs"
SIZES = (10, 100, 1000)
WIDE = 512  # of the layers whose bytes are counted: activations of one row weigh nothing beside them


def image_classes():
    return torch.randn(4, 3, 32, 32), torch.arange(4)


MODELS = {
    "convolutions": Case(lambda: Conv(8), image_classes),
    "ResNet": Case(lambda: resnet(8, (1, 1, 1, 1)), image_classes),
    "transformer": Case(lambda: Transformer(32, 4), lambda: (torch.randn(4, 6, 32), torch.arange(4))),
}


def counted(variant, case):
    """Kernels, launches and host syncs of a step, as a cell of a table."""
    reset()
    step = warmed_up(variant, case)
    with Log() as log:
        step()
    return f"{log.kernels:,}, {log.launches:,}, {log.syncs}"


def bytes_per_parameter(variant, optimizer):
    """Bytes that a device holds between steps, and at most during one, as a cell of a table."""
    case = residual(20, optimizer, WIDE, rows=1)
    count = sum(param.numel() for param in case.model().parameters())
    reset()
    gc.collect()
    before = emulated_cuda.device.get_bytes_held()
    step = warmed_up(variant, case)
    gc.collect()
    emulated_cuda.device.reset_bytes_peak()
    held = emulated_cuda.device.get_bytes_held() - before
    step()
    peak = emulated_cuda.device.get_bytes_peak() - before
    return f"{held / count:.1f}, {peak / count:.1f}"


def main():
    reason = emulated_cuda.why_not()
    if reason is not None:
        sys.exit(reason)
    emulated_cuda.install()
    for optimizer in OPTIMIZERS:
        head = [
            f"{optimizer}: {COUNTS}",
            *(f"{size:,} parameters" for size in SIZES),
            "bytes per parameter: held, peak",
        ]
        rows = []
        for variant in VARIANTS:
            report.progress(f"{optimizer}, {variant}")
            sizes = [counted(variant, residual(size, optimizer)) for size in SIZES]
            rows.append([variant, *sizes, bytes_per_parameter(variant, optimizer)])
        sys.stdout.write(report.table(head, rows) + "\n")
    rows = [[variant, *(counted(variant, case) for case in MODELS.values())] for variant in VARIANTS]
    sys.stdout.write(report.table([f"AdamW: {COUNTS}", *MODELS], rows))


if __name__ == "__main__":
    main()
