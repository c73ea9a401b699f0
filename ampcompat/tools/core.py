"""Everything that the tools beside a run read of amp's core: the one module to follow a change of the core in.

``ampcompat.tools.check`` and ``ampcompat.tools.migrate`` read source code and need none of it.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from ampcompat import _torch
from ampcompat._log import rank as rank
from ampcompat._log import say as say
from ampcompat._state import state
from ampcompat._types import HALF_DTYPES as HALF_DTYPES
from ampcompat._types import ParamGroup as ParamGroup
from ampcompat.amp.casts.contexts import CastsOff as CastsOff
from ampcompat.amp.casts.trees import map_tree as map_tree
from ampcompat.amp.casts.trees import tensors_in as tensors_in
from ampcompat.amp.half.devices import model_index
from ampcompat.amp.half.forward import Args as Args
from ampcompat.amp.half.forward import Kwargs as Kwargs
from ampcompat.amp.half.masters import Master as Master
from ampcompat.amp.half.masters import master_of as master_of
from ampcompat.amp.hints import add_hint as add_hint
from ampcompat.amp.levels import LEVELS as LEVELS
from ampcompat.amp.observers import notify as notify
from ampcompat.amp.observers import observers as observers
from ampcompat.amp.observers import observing as observing
from ampcompat.amp.scaling import optimizer as _optimizer
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler as LossScaler
from ampcompat.amp.scaling.session import session_state

Optimizer: TypeAlias = AmpOptimizer


# -- the latest session ------------------------------------------------------------------------------------------------
class LatestSession(NamedTuple):
    """What the latest ``initialize`` was asked for.

    Attributes:
        enabled: Whether amp is on.
        opt_level: As in "O1".
        half_dtype: The half dtype; None where nothing is half.
    """

    enabled: bool
    opt_level: str
    half_dtype: torch.dtype | None


def latest_session() -> LatestSession | None:
    """What the latest ``initialize`` was asked for; None before the first."""
    latest = session_state.latest
    if latest is None:
        return None
    policy = latest.policy
    is_half = latest.enabled and (policy.half_dtype is not None or policy.casts.enabled)
    return LatestSession(latest.enabled, policy.opt_level, latest.half_dtype if is_half else None)


def live_models() -> list[torch.nn.Module]:
    """The models that ``initialize`` was given and that still live."""
    return list(model_index.live)


def live_optimizers() -> list[Optimizer]:
    """The optimizers that ``initialize`` was given and that still live, in the order in which it was."""
    return optimizer_index.listed()


def name_of(param: torch.Tensor) -> str:
    """Qualified name of ``param``, or of the weight whose master it is, in the live models."""
    master = master_of(param)
    wanted = (param,) if master is None else (param, master.half)
    models = live_models()
    for model in models:
        for name, held in model.named_parameters():
            if any(held is one for one in wanted):
                return f"{type(model).__name__}.{name}" if len(models) > 1 else name
    return ""


def at_reset(undo: Callable[[], object]) -> None:
    """Call ``undo`` when amp is reset."""
    state.undo.callback(undo)


def reset() -> None:
    """Undo what amp has changed, and forget every session."""
    state.reset()


# -- optimizers and scalers --------------------------------------------------------------------------------------------
def optimizer_name(optimizer: object) -> str:
    """The class that steps; for a wrapper such as LARC, that of the optimizer inside."""
    return type(getattr(optimizer, "optim", optimizer)).__name__


#: Scale and clean passes of a scaler; on their way to the host, where they are on a device.
Numbers = _torch.HostCopy | tuple[float, float]


def numbers_of(scaler: LossScaler) -> Numbers:
    """The scale of ``scaler``, and the passes since it last moved. No host sync."""
    scale = scaler.scale
    passes = scaler.clean_passes
    if scale is None or passes is None:  # nothing was scaled yet, or it is a static 1
        return scaler.get_scale(), scaler._unskipped
    return _torch.HostCopy([scale, passes.to(scale.dtype)])


def scale_and_passes(numbers: Numbers) -> tuple[float, float]:
    """What :func:`numbers_of` returned, once it is on the host; waits for that."""
    scale, passes = numbers if isinstance(numbers, tuple) else numbers.read()
    return scale, passes


def overflowed_scalers(optimizer: Optimizer) -> list[LossScaler]:
    """In ``on_step``: the scalers of the losses whose overflow skipped the step. A host sync for each flag."""
    flags = optimizer._amp_stash.flags()
    return list(dict.fromkeys(scaler for scaler, flag in flags if flag.item()))


def has_warned_of(mistake: str) -> bool:
    """Whether amp has warned of ``mistake``, a key of ``warn_once`` in ``amp.misuse``."""
    return mistake in state.warned


def steps_of_session(optimizer: Optimizer) -> int:
    """The steps so far of all optimizers in the session of ``optimizer``."""
    steps: int = optimizer._amp_stash.session.steps
    return steps


def was_skipped(optimizer: Optimizer, skipped: bool | None) -> bool:
    """Whether the last step was skipped, given what an observer was told. A host sync where only the device knows."""
    return _optimizer.step_was_skipped(optimizer) if skipped is None else skipped


class SkipFlag:
    """Whether a step was skipped; where only the device knows, the flag is on its way to the host for amp itself.

    Args:
        optimizer: It has just made the step, or skipped it.
        skipped: What an observer is told of that; None where only the device knows.
    """

    def __init__(self, optimizer: Optimizer, skipped: bool | None) -> None:
        stash = optimizer._amp_stash
        if skipped is None and not stash.undecided_steps:  # another observer has asked the device meanwhile
            skipped = stash.device_skipped
        self._known = skipped
        self._flags = [copy for _, copy in stash.undecided_steps[-1]] if skipped is None else []

    def arrived(self) -> bool:
        """Whether :meth:`read` need not wait."""
        return all(flag.arrived() for flag in self._flags)

    def read(self) -> bool:
        """Whether it was skipped; waits for the device where that has not arrived."""
        return self._known or any(flag.read()[0] for flag in self._flags)


def wrap_step(optimizer: Any, before: Callable[[Optimizer], bool]) -> None:
    """Have ``optimizer.step`` ask ``before`` first; where it returns true, the step is skipped as after an overflow."""
    if getattr(optimizer.step, "_amp_asks", None) is before:
        return
    step = optimizer.step

    @functools.wraps(getattr(step, "__func__", step))
    def wrapper(self: Optimizer, closure: Callable[[], object] | None = None, **kwargs: object) -> object:
        if not before(self):
            return step(closure, **kwargs) if closure is not None else step(**kwargs)
        loss = None if closure is None else closure()
        with CastsOff():
            notify("on_step", self, True)
        return loss

    wrapper._amp_asks = before  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(wrapper, optimizer)


# -- what runs now -----------------------------------------------------------------------------------------------------
def world_size() -> int:
    """How many processes train together, as far as this one knows."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    word = os.environ.get("WORLD_SIZE", "")
    return int(word) if word.isdecimal() else 1


def is_replica(model: torch.nn.Module) -> bool:
    """Whether ``model`` is a replica of DataParallel."""
    return hasattr(model, "_is_replica")
