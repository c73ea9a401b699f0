"""``assert_opt_level_parity``: a training loop gives the losses of float32 at every level, within a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import SupportsFloat

import torch

from ampcompat.tools.core import LEVELS, observing, reset
from ampcompat.tools.generators import random_state, seed_all, set_random_state
from ampcompat.tools.parity.compare import Tolerance, judge, judge_again, must_repeat, passed
from ampcompat.tools.parity.levels import REFERENCE, Level
from ampcompat.tools.parity.runs import Run, run_all
from ampcompat.tools.parity.table import table
from ampcompat.tools.recording.recorder import Recorder
from ampcompat.tools.recording.skips import Skips

__all__ = ["assert_opt_level_parity"]


def assert_opt_level_parity(
    train: Callable[[str], Iterable[SupportsFloat] | None],
    levels: Sequence[str] = ("O1", "O2"),
    rtol: float = 1e-2,
    atol: float = 0.0,
) -> dict[str, list[float]]:
    """Fail unless ``train`` has the same losses at every one of ``levels`` as at O0, within the tolerance.

    Args:
        train: Called once per level with the level's name (and once more at O0 for a level that skipped steps, see
            below): builds the model, calls ``amp.initialize(..., opt_level=level)`` and trains. It returns the losses
            (floats or one-element tensors, on any device, read with one host sync each), or None: then those are taken
            that ``scale_loss`` and ``step`` saw, one per optimizer step.
        levels: The levels to compare.
        rtol: Relative tolerance: ``|loss - O0's| <= atol + rtol * |O0's|`` at every step.
        atol: Absolute tolerance, in units of the loss.

    Returns:
        The losses by level, those of O0 included.

    Raises:
        AssertionError: A loss is out of tolerance or not finite (where that of O0 is), more than half of the steps
            were skipped, or the numbers of losses differ. The message has the table of ``ampcompat parity``. Where a
            second training at O0 has another first loss, it says that ``train`` is not repeatable.
        TypeError: ``levels`` is a string, or ``train`` returned something else than losses.
        ValueError: An unknown level, a negative tolerance, or a ``train`` that shows no losses.

    A level that skipped steps for an overflow, as the first ones are while the loss scale is found, is compared with a
    training at O0 that skips the same steps: the same updates are applied.

    The global generators of Python's ``random``, numpy and torch are seeded anew for each level; their states outside
    come back afterwards. amp is reset before each level and at the end: each level starts from an unchanged torch.
    """
    __tracebackhide__ = True  # pytest shows the call and the message, not these lines
    if isinstance(levels, str):
        raise TypeError(f"levels={levels!r} is a string - it must be a sequence of levels - pass ({levels!r},).")
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"{level!r} is not an opt_level - it must be one of {', '.join(LEVELS)} - pass these.")
    if not levels or not (rtol >= 0 and atol >= 0):
        raise ValueError(
            f"levels={levels!r}, rtol={rtol!r}, atol={atol!r} - there must be a level, and no negative tolerance"
            " - pass levels=('O1',), for example."
        )
    tolerance = Tolerance(rtol, atol)

    def run(level: Level, skips: Sequence[int]) -> Run:
        return _run(train, level, skips)

    runs = run_all([Level(level) for level in dict.fromkeys((REFERENCE.opt_level, *levels))], run)
    results = judge(runs, tolerance)
    if must_repeat(results):
        results = judge_again(results, run(REFERENCE, ()))
    if not passed(results[1:]):
        is_repeatable = not any(result.not_repeatable for result in results)
        told = f"losses differ from those at {REFERENCE.opt_level}" if is_repeatable else "train is not repeatable"
        raise AssertionError("\n\n".join([told, table(results, tolerance)]))
    return {run.level.opt_level: [loss for loss in run.losses if loss is not None] for run in runs}


def _run(train: Callable[[str], Iterable[SupportsFloat] | None], level: Level, skips: Sequence[int]) -> Run:
    """Train at one level, from the same seeds and a torch that amp has not touched.

    Steps numbered ``skips`` are skipped as after an overflow.
    """
    run = Run(level)
    reset()
    recorder = Recorder(run.steps.append, losses=True)
    try:
        with _seeded(), observing(recorder), observing(Skips(recorder, skips)):
            returned = train(level.opt_level)
            if returned is not None:
                run.returned = _numbers(returned, level.opt_level)
    finally:
        reset()
    if not run.is_comparable:
        raise ValueError(
            f"train({level.opt_level!r}) showed no losses - it returned"
            f" {'None' if returned is None else 'an empty sequence'} and made {len(run.steps)} optimizer steps after a"
            " scale_loss block - return the losses, or train with amp."
        )
    return run


def _numbers(returned: Iterable[SupportsFloat], level: str) -> list[float]:
    """The losses that ``train`` has returned, as floats."""
    if not isinstance(returned, Iterable) or getattr(returned, "ndim", 1) == 0:
        raise _no_losses(returned, level)
    numbers: list[float] = []
    for loss in returned:
        try:
            numbers.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        except (TypeError, ValueError, RuntimeError):
            raise _no_losses(returned, level, f" with a {type(loss).__name__} in it that is no number") from None
    return numbers


def _no_losses(returned: object, level: str, more: str = "") -> TypeError:
    return TypeError(
        f"train({level!r}) returned a {type(returned).__name__}{more} - it must return the losses of its steps, or None"
        " - collect them: losses.append(loss.detach())."
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """The global generators seeded inside, and as they were afterwards."""
    before = random_state([])
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # torch warns where it is not told which of several
        seed_all()
        try:
            yield
        finally:
            set_random_state(before)
