"""``assert_opt_level_parity``: a training loop gives the losses of float32 at every level, within a tolerance."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ampcompat._state import state
from ampcompat.amp.observers import observing
from ampcompat.parity.compare import Deviation, Tolerance, compare
from ampcompat.parity.levels import OPT_LEVELS
from ampcompat.parity.record import Step
from ampcompat.parity.recorder import Recorder
from ampcompat.testing.report import failure

__all__ = ["assert_opt_level_parity"]


def assert_opt_level_parity(
    train: Callable[[str], Iterable[Any] | None],
    levels: Sequence[str] = ("O1", "O2"),
    rtol: float = 1e-2,
    atol: float = 0.0,
    reference: str = "O0",
    seed: int = 0,
) -> dict[str, list[float]]:
    """Fail unless ``train`` has the same losses at every one of ``levels`` as at ``reference``, within the tolerance.

    Args:
        train: Called once per level with the level's name: builds the model, calls ``amp.initialize(...,
            opt_level=level)`` and trains. It returns the losses (floats or one-element tensors, on any device, read
            with one host sync each), or None: then those are taken that ``scale_loss`` and ``step`` saw, one per
            optimizer step.
        levels: The levels to compare.
        rtol: Relative tolerance: ``|loss - reference| <= atol + rtol * |reference|`` at every step.
        atol: Absolute tolerance, in units of the loss.
        reference: The level to compare with.
        seed: Of Python's ``random``, numpy's and torch's global generators, set anew for each level; their states
            outside come back afterwards.

    Returns:
        The losses by level, the reference's included.

    Raises:
        AssertionError: A loss is out of tolerance or not finite (where the reference is), or the numbers of steps
            differ. The message names the first such step and holds a table of the losses around it.
        ValueError: An unknown level, a negative tolerance, or a ``train`` that shows no losses.

    amp is reset before each level and at the end: what an earlier ``amp.initialize`` did to torch is undone, and each
    level starts from a torch that nobody has touched.
    """
    for level in (reference, *levels):
        if level not in OPT_LEVELS:
            raise ValueError(f"{level!r} is no opt_level - it must be one of {', '.join(OPT_LEVELS)} - pass these.")
    if not levels or not (rtol >= 0 and atol >= 0):
        raise ValueError(
            f"levels={levels!r}, rtol={rtol!r}, atol={atol!r} - there must be a level, and no negative tolerance"
            " - pass levels=('O1',), for example."
        )
    tolerance = Tolerance(rtol, atol)
    losses: dict[str, list[float]] = {}
    for level in dict.fromkeys((reference, *levels)):
        losses[level] = _losses(train, level, seed)
    results = {level: compare(losses[level], losses[reference], tolerance) for level in levels}
    if any(_failed(losses[level], losses[reference], result) for level, result in results.items()):
        raise AssertionError(failure(losses, reference, results, tolerance))
    return losses


def _failed(losses: list[float], reference: list[float], result: Deviation) -> bool:
    return result.first_beyond is not None or len(losses) != len(reference)


def _losses(train: Callable[[str], Iterable[Any] | None], level: str, seed: int) -> list[float]:
    """The losses of one level, from the seed and a torch that amp has not touched."""
    recorded: list[Step] = []
    state.reset()
    try:
        with _seeded(seed), observing(Recorder(recorded.append)):
            returned = train(level)
            losses = None if returned is None else [float(loss) for loss in returned]
    finally:
        state.reset()
    if losses is None:
        losses = [step.loss for step in recorded if step.loss is not None]
    if not losses:
        raise ValueError(
            f"train({level!r}) showed no losses - it returned {'None' if returned is None else 'an empty sequence'} and"
            f" made {len(recorded)} optimizer steps after a scale_loss block - return the losses, or train with amp."
        )
    return losses


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators seeded inside, and as they were afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(numpys)
