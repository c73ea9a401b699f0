"""Masters by the names of their half weights, for ``torch.distributed.checkpoint``.

Its ``get_state_dict`` and ``set_state_dict`` name what an optimizer holds by looking for it among the model's
parameters. Masters are not among these. While torch saves or loads the state of optimizers, each master stands in the
place of its half weight, so that a checkpoint has the names that it would have without amp, and float32 state. A script
without a process group imports that module before ``initialize``. apex had no such checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.optimizer_state import OptimizerState


def install() -> None:
    """Let ``torch.distributed.checkpoint``, where a script uses it, find masters from now on."""
    if _torch.has_distributed_checkpoint():
        state.patch_once(_torch.patch_distributed_checkpoint, _masters_named)


@contextmanager
def _masters_named(
    model: torch.nn.Module, optimizers: Sequence[Any], names: MutableMapping[Any, set[str]]
) -> Iterator[None]:
    """Let torch name the masters that ``optimizers`` hold; they step as plain optimizers meanwhile.

    torch makes state that an optimizer has not made yet by a step with a learning rate of zero, past any loss.
    """
    stashes: list[tuple[Any, OptimizerState]] = []
    masters: list[Master] = []
    for optimizer in optimizers:
        stash = vars(optimizer).get("_amp_stash")
        if stash is not None:
            follow_changes(optimizer)
            stashes.append((optimizer, stash))
            masters += stash.leaves.masters
    by_half = {master.half: master.value for master in masters}
    shown = [(name, by_half.get(param, param)) for name, param in model.named_parameters()]
    for half, value in by_half.items():
        if half in names:
            names[value] = names[half]
    around = model.__dict__.get("named_parameters")  # loading a whole state, torch asks for its names inside
    object.__setattr__(model, "named_parameters", lambda: iter(shown))
    for optimizer, _ in stashes:
        del optimizer._amp_stash
    try:
        yield
    finally:
        if around is None:
            del model.__dict__["named_parameters"]
        else:
            object.__setattr__(model, "named_parameters", around)
        for optimizer, stash in stashes:
            optimizer._amp_stash = stash
