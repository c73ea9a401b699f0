"""All checks on all devices, one after the other."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ampcompat.tools.selftest import checks, ranks
from ampcompat.tools.selftest.checks import Failed, Skipped


@dataclass(frozen=True)
class Row:
    """The outcome of one check.

    Attributes:
        device: Such as ``"cuda:0"``.
        check: Such as ``"training"``.
        level: The opt_level.
        result: ``"ok"``, ``"FAIL"`` or ``"skip"``.
        remark: What was seen, or what is wrong.
        seconds: How long it took.
    """

    device: str
    check: str
    level: str
    result: str
    remark: str
    seconds: float


def run(devices: Sequence[str]) -> Iterator[Row]:
    """Check each of ``devices`` and yield a row as soon as it is known; torch is as it was afterwards.

    Two processes per device type train under DDP meanwhile, where there are as many devices.
    """
    kinds = list(dict.fromkeys(torch.device(name).type for name in devices))
    with _undisturbed(), ExitStack() as stack:
        started = {kind: stack.enter_context(ranks.started(kind)) for kind in kinds if ranks.can_start(kind)}
        checks.build(torch.device("cpu"))  # the first optimizer imports torch's compiler, which takes seconds
        for name in devices:
            for check, function, level in checks.each_check():
                yield _row(name, check, level, partial(function, torch.device(name), level))
        for kind in kinds:
            yield _row(kind, "ddp", ", ".join(ranks.LEVELS), started.get(kind, _cannot_start))


def _cannot_start() -> str:
    raise Skipped(f"needs {ranks.WORLD} devices and their process group backend")


def _row(device: str, check: str, level: str, function: Callable[[], str]) -> Row:
    begin = time.perf_counter()
    try:
        result, remark = "ok", function()
    except Skipped as why:
        result, remark = "skip", str(why)
    except Failed as why:
        result, remark = "FAIL", str(why)
    except Exception as error:  # whatever a broken installation raises is a result
        result, remark = "FAIL", f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    return Row(device, check, level, result, remark, time.perf_counter() - begin)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the settings of the environment, and without warnings: both change what the checks look at."""
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("AMPCOMPAT_")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.update(before)
