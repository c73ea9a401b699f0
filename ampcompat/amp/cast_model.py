"""Casting a model's weights to half, and back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ampcompat import _torch
from ampcompat.amp import master_index, model_state
from ampcompat.amp.masters import Master

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stays_float32(module: torch.nn.Module, keep_batchnorm_fp32: bool) -> bool:
    """Whether ``module``'s own tensors are left in float32: affine batch norm, when asked for, as under apex."""
    return keep_batchnorm_fp32 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine


def cast_weights(
    models: Iterable[torch.nn.Module],
    dtype: torch.dtype | None,
    keep_batchnorm_fp32: bool,
    master_weights: bool,
    trained: set[int],
    undo: ExitStack,
    kept: frozenset[torch.nn.Module] = frozenset(),
) -> None:
    """Cast every floating parameter and buffer of ``models`` to ``dtype``, in place; complex tensors stay.

    Parameters keep their identity, so optimizers and hooks that hold them go on holding the model's. Weights that an
    earlier call had cast are restored from their masters first: going from one level to another loses no bit.

    Args:
        models: Modules; tied weights and nested models are cast once.
        dtype: float16, bfloat16 or float32; None leaves alone what no earlier call had cast, and restores the rest.
        keep_batchnorm_fp32: Affine batch norm goes to float32 instead.
        master_weights: Half tensors get float32 masters, and ``state_dict`` hands those out.
        trained: ids of the tensors that some optimizer holds: their masters are made now, from the float32 values,
            the others' when first needed.
        undo: Takes the undo of every change.
        kept: Modules that go to float32 instead (``keep_fp32``).
    """
    for module in {id(m): m for model in models for m in model.modules()}.values():
        before = module.__dict__.get("_amp_half")
        wide = module in kept or stays_float32(module, keep_batchnorm_fp32)
        target = torch.float32 if wide and dtype is not None else dtype
        if target is None and before is not None:
            target = torch.float32
        if target is None:
            continue
        half = target != torch.float32
        undo.callback(model_state.put_back, module, before, dict(module.__dict__.get("_amp_masters", {})))
        for name, tensor in master_index.own_tensors(module):
            if tensor.dtype in _CASTABLE:
                _cast(module, name, tensor, target, half and master_weights, trained, undo)
        if half:
            model_state.install(module, target, master_weights)
        else:
            model_state.remove(module)
            master_index.drop_all(module)


def _cast(
    module: torch.nn.Module,
    name: str,
    tensor: torch.Tensor,
    target: torch.dtype,
    master_weights: bool,
    trained: set[int],
    undo: ExitStack,
) -> None:
    master = module.__dict__.get("_amp_masters", {}).get(name) or master_index.master_of_half(tensor)
    if master is not None:
        master.register()
        master.absorb()
    alone = tensor.dtype == torch.float32 != target and master is None and _torch.owns_memory_alone(tensor)
    exact = tensor.detach() if master is None else master.value.detach()
    if tensor.dtype != target:
        undo.callback(_put_data_back, tensor, tensor.data, tensor.grad, master)
        # A gradient cannot have another dtype than its parameter, and an optimizer must not step with a stale one.
        tensor.grad = None
        tensor.data = exact.clone() if target == exact.dtype else exact.to(target)
        if master is not None and target != torch.float32:
            master.dtype = target
            master.push()
        elif master is not None:
            master.retire()
    borrowed = master is not None and id(master.value) in trained
    if master_weights and (borrowed or id(tensor) in trained):
        if alone:  # the float32 values lie in the memory that the model just left: no copy, no second peak of memory
            exact = torch.nn.Parameter(exact.data, tensor.requires_grad)
        master_index.ensure_master(module, name, exact, adopt=alone)


def _put_data_back(tensor: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None, master: Master | None) -> None:
    tensor.data = data
    tensor.grad = grad
    if master is not None:
        master.dtype = data.dtype
        master.register()
        master.settle()
