"""Casting networks to half, and moving values between half parameters and float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

__all__ = ["clip_grad_norm"]


class tofp16(nn.Module):
    """Casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast the affine batch norms in ``module`` back to float32, in place; returns ``module``."""
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.affine:
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """``network`` in float16 (in place) with float32 batch norms, behind a cast of the input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters and buffers that ``module`` itself owns, in place; its children stay."""
    for param in module.parameters(recurse=False):
        if param.dtype.is_floating_point:
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.dtype.is_floating_point:
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` to ``dtype`` in place, all but its affine batch norms; returns it."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """``network`` in float16 with float32 batch norms; tensor inputs are cast to float16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """The network's output for the inputs in float16."""
        return self.network(*(value.half() for value in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters of ``model`` and float32 masters of them.

    Args:
        model: The model; it is not changed.
        flat_master: One flat master with a zero gradient, instead of one master a parameter.

    Returns:
        ``(model_params, master_params)``.

    Raises:
        ValueError: ``flat_master`` with parameters of several dtypes, or without any parameter.
    """
    model_params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(p.detach().clone().float()) for p in model_params]
    dtypes = {p.dtype for p in model_params}
    if len(dtypes) != 1:
        raise ValueError(
            f"flat_master=True with parameters of dtypes {sorted(map(str, dtypes))} - a flat master needs exactly "
            "one dtype - use flat_master=False."
        )
    master = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model_params]).float())
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in like])
    return [part.view_as(p) for part, p in zip(parts, like, strict=True)]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients to the masters; a parameter without one clears its master's (a flat master gets zeros)."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        flat = torch.cat([g.reshape(-1) for g in grads])
        master_params[0].grad = flat.to(master_params[0].dtype)
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters' values to the model's parameters."""
    sources = _pieces(master_params[0], model_params) if flat_master else master_params
    for model, master in zip(model_params, sources, strict=True):
        model.copy_(master)


def to_python_float(t: Tensor | Sequence[float]) -> float:
    """The number in ``t``, a one-element tensor or a sequence (waits for the device)."""
    return float(t.item() if hasattr(t, "item") else t[0])
