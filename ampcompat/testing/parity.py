"""``assert_opt_level_parity``: a training loop gives the losses of float32 at every level, within a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import SupportsFloat

import torch

from ampcompat.testing.report import failure
from ampcompat.tools.core import LEVELS, observing, reset
from ampcompat.tools.generators import random_state, seed_all, set_random_state
from ampcompat.tools.parity.compare import Deviation, Tolerance, compare
from ampcompat.tools.recording.recorder import Recorder
from ampcompat.tools.recording.skips import Skips
from ampcompat.tools.recording.steps import Step

__all__ = ["assert_opt_level_parity"]


def assert_opt_level_parity(
    train: Callable[[str], Iterable[SupportsFloat] | None],
    levels: Sequence[str] = ("O1", "O2"),
    rtol: float = 1e-2,
    atol: float = 0.0,
    reference: str = "O0",
    seed: int = 0,
) -> dict[str, list[float]]:
    """Fail unless ``train`` has the same losses at every one of ``levels`` as at ``reference``, within the tolerance.

    Args:
        train: Called once per level with the level's name (and once more at the reference for a level that skipped
            steps, see below): builds the model, calls ``amp.initialize(...,
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

    A level that skipped steps for an overflow, as the first ones are while the loss scale is found, is compared with a
    training at the reference that skips the same steps: the same updates are applied. The message names them.

    amp is reset before each level and at the end: what an earlier ``amp.initialize`` did to torch is undone, and each
    level starts from an unchanged torch.
    """
    __tracebackhide__ = True  # pytest shows the call and the message, not these lines
    for level in (reference, *levels):
        if level not in LEVELS:
            raise ValueError(f"{level!r} is not an opt_level - it must be one of {', '.join(LEVELS)} - pass these.")
    if not levels or not (rtol >= 0 and atol >= 0):
        raise ValueError(
            f"levels={levels!r}, rtol={rtol!r}, atol={atol!r} - there must be a level, and no negative tolerance"
            " - pass levels=('O1',), for example."
        )
    tolerance = Tolerance(rtol, atol)
    losses: dict[str, list[float]] = {}
    skipped: dict[str, tuple[int, ...]] = {}
    for level in dict.fromkeys((reference, *levels)):
        losses[level], skipped[level] = _losses(train, level, seed)
    bases = {skipped[reference]: losses[reference], (): losses[reference]}
    for level in levels:
        if skipped[level] not in bases:
            bases[skipped[level]], _ = _losses(train, reference, seed, skipped[level])
    by_level = {level: bases[skipped[level]] for level in levels}
    results = {level: compare(losses[level], by_level[level], tolerance) for level in levels}
    if any(_failed(losses[level], by_level[level], result) for level, result in results.items()):
        raise AssertionError(failure(losses, reference, results, tolerance, by_level, skipped))
    return losses


def _failed(losses: list[float], reference: list[float], result: Deviation) -> bool:
    return result.first_beyond is not None or len(losses) != len(reference)


def _losses(
    train: Callable[[str], Iterable[SupportsFloat] | None], level: str, seed: int, skips: tuple[int, ...] = ()
) -> tuple[list[float], tuple[int, ...]]:
    """The losses of one level, from the seed and a torch that amp has not touched, and the steps that it skipped.

    Steps numbered ``skips`` are skipped as after an overflow.
    """
    recorded: list[Step] = []
    reset()
    recorder = Recorder(recorded.append, measure=True)
    try:
        with _seeded(seed), observing(recorder), observing(Skips(recorder, skips)):
            returned = train(level)
            losses = None if returned is None else [float(loss) for loss in returned]
    finally:
        reset()
    if losses is None:
        losses = [step.loss for step in recorded if step.loss is not None]
    if not losses:
        raise ValueError(
            f"train({level!r}) showed no losses - it returned {'None' if returned is None else 'an empty sequence'} and"
            f" made {len(recorded)} optimizer steps after a scale_loss block - return the losses, or train with amp."
        )
    return losses, tuple(step.step for step in recorded if step.skipped)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators seeded inside, and as they were afterwards."""
    before = random_state([])
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # torch warns where it is not told which of several
        seed_all(seed)
        try:
            yield
        finally:
            set_random_state(before)
