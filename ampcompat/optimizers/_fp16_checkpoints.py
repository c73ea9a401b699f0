"""Older checkpoints of :class:`~ampcompat.optimizers.fp16_optimizer.FP16_Optimizer`, in today's form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat._types import HALF_DTYPES, ParamGroup
from ampcompat.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, restored_scaler


def does_not_fit(what: str, saved: object, own: object) -> ValueError:
    """Make the error for masters that are not those of this model; ``what`` names what of them differs."""
    return ValueError(
        f"FP16_Optimizer.load_state_dict got masters with the {what} {saved}, where there are {own} - they must match"
        " one by one - load the checkpoint of this model, with the same param groups."
    )


def from_flat_masters(state_dict: StateDict, fp32_groups: list[list[Tensor]]) -> StateDict:
    """Return a checkpoint of apex before December 2019 with a master, and state, for each parameter.

    In the file each group has one flat master, which the optimizer inside had as its only parameter.

    Args:
        state_dict: The checkpoint.
        fp32_groups: The masters that will be loaded.

    Raises:
        ValueError: The flat masters have other sizes.
    """
    flat_masters = state_dict["fp32_groups_flat"]
    saved_sizes = [flat.numel() for flat in flat_masters]
    sizes = [sum(master.numel() for master in group) for group in fp32_groups]
    if saved_sizes != sizes:
        raise does_not_fit("sizes", saved_sizes, sizes)
    of_optimizer = state_dict["optimizer_state_dict"]
    states: dict[int, dict[str, Any]] = {}
    groups: list[ParamGroup] = []
    for masters, saved_group in zip(fp32_groups, of_optimizer["param_groups"], strict=True):
        first = len(states)
        (flat_key,) = saved_group["params"]
        flat_state = of_optimizer["state"].get(flat_key, {})
        for number in range(len(masters)):
            states[first + number] = {name: _part(value, number, masters) for name, value in flat_state.items()}
        groups.append({**saved_group, "params": list(range(first, len(states)))})
    unflattened = [_unflatten(flat, masters) for flat, masters in zip(flat_masters, fp32_groups, strict=True)]
    return {
        **state_dict,
        "fp32_groups": unflattened,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
    }


def _unflatten(flat: Tensor, masters: list[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [master.numel() for master in masters])
    return [part.view(master.shape) for part, master in zip(parts, masters, strict=True)]


def _part(value: object, number: int, masters: list[Tensor]) -> object:
    """Return what one master has of the state of the flat one: its elements, or the same where it is a number."""
    if not isinstance(value, Tensor) or value.numel() != sum(master.numel() for master in masters):
        return value
    return _unflatten(value, masters)[number]


def from_version_010(state_dict: StateDict, fp16_groups: list[list[Tensor]]) -> StateDict:
    """Return a checkpoint of ampcompat 0.1.0, which has masters of trained half parameters alone.

    Args:
        state_dict: The checkpoint.
        fp16_groups: The model's parameters; float32 ones are their own saved masters.

    Raises:
        ValueError: It is of ``fp16_utils.FP16_Optimizer``, or of another model.
    """
    scaler = restored_scaler(state_dict["loss_scaler"])
    if not isinstance(scaler, LossScaler):
        raise ValueError(
            "FP16_Optimizer.load_state_dict got a checkpoint of fp16_utils.FP16_Optimizer - this is the FP16_Optimizer"
            " of apex.contrib.optimizers - load it into the class that wrote it."
        )
    saved: StateDict = {
        "dynamic_loss_scale": state_dict["dynamic_loss_scale"],
        "cur_scale": scaler.cur_scale,
        "cur_iter": 0,
        "optimizer_state_dict": state_dict["optimizer_state_dict"],
    }
    if isinstance(scaler, DynamicLossScaler):
        for name in ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window"):
            saved[name] = getattr(scaler, name)
    counts = [len(group) for group in state_dict["fp32_from_fp16"]]
    own_counts = [sum(_had_a_master(param) for param in group) for group in fp16_groups]
    if counts != own_counts:
        raise does_not_fit("counts", counts, own_counts)
    saved["fp32_groups"] = []
    for params, masters in zip(fp16_groups, state_dict["fp32_from_fp16"], strict=True):
        left = iter(masters)
        saved["fp32_groups"].append([next(left) if _had_a_master(param) else param for param in params])
    return saved


def _had_a_master(param: Tensor) -> bool:
    return param.requires_grad and param.dtype in HALF_DTYPES
