"""``FP16_Optimizer``: float32 masters and loss scaling around any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from ampcompat._log import say
from ampcompat._types import HALF_DTYPES, ParamGroup, ParamState
from ampcompat.fp16_utils.fp16util import master_params_to_model_params, model_grads_to_master_grads
from ampcompat.fp16_utils.loss_scaler import (
    AnyLossScaler,
    CallableLossScaler,
    dynamic_scaler,
    restored_scaler,
)


class FP16_Optimizer:
    """Wraps ``init_optimizer``: its half parameters are replaced by float32 masters, which it then steps.

    Args:
        init_optimizer: Optimizer over half and float32 parameters, of any device.
        static_loss_scale: Fixed loss scale.
        dynamic_loss_scale: Let the scale move, as in apex from March 2019 on: from 2^16, up to 2^24, growing after 2000
            clean steps.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_loss_scale``, ``max_loss_scale``.
            With ``min_scale`` or ``delayed_shift``: all are those of :class:`DynamicLossScaler`, apex's before.
        verbose: Say what happens, on rank 0.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer, or a parameter is neither half nor float32.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(
                f"init_optimizer={type(init_optimizer).__name__} - FP16_Optimizer wraps a torch optimizer - "
                "build the optimizer first and pass it."
            )
        for group in init_optimizer.param_groups:
            for p in group["params"]:
                if p.dtype not in (*HALF_DTYPES, torch.float32):
                    raise TypeError(f"A parameter of {p.dtype} - only float16, bfloat16 and float32 - cast it first.")
        self.loss_scaler: AnyLossScaler
        if dynamic_loss_scale:
            self.loss_scaler = dynamic_scaler(dynamic_loss_args or {})
        else:
            self.loss_scaler = CallableLossScaler(static_loss_scale)
        self.dynamic_loss_scale = dynamic_loss_scale
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self._take(group)

    def _take(self, group: ParamGroup) -> None:
        trainable = [p for p in group["params"] if p.requires_grad]
        halves = [p for p in trainable if p.dtype in HALF_DTYPES]
        masters: list[Tensor] = [nn.Parameter(p.detach().clone().float()) for p in halves]
        swap = dict(zip(map(id, halves), masters, strict=True))
        group["params"] = [swap.get(id(p), p) for p in group["params"]]
        for half, master in zip(halves, masters, strict=True):
            if half in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(half)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append([p for p in trainable if p.dtype is torch.float32])

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of half or float32 parameters; halves get masters."""
        self.optimizer.add_param_group(param_group)
        self._take(self.optimizer.param_groups[-1])

    def _say(self, message: str) -> None:
        if self.verbose:
            say(message)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The half parameters of the model, of all groups."""
        return [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters, in the order of :attr:`all_fp16_params`."""
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that are float32 in the model, of all groups."""
        return [p for group in self.fp32_from_fp32_groups for p in group]

    def _master_params_to_model_params(self) -> None:
        """Copy the masters to the model; scripts call it after they have written to masters."""
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def _model_grads_to_master_grads(self) -> None:
        """Copy the model's gradients to the masters, still scaled; scripts that unscale by hand call it."""
        model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def _master_params(self) -> list[Tensor]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model's parameters and of the masters."""
        for p in (*self.all_fp16_params, *self._master_params()):
            if set_grads_to_None:
                p.grad = None
            elif p.grad is not None and p.grad.grad_fn is not None:
                p.grad.detach_().zero_()
            elif p.grad is not None:  # a view of DDP's bucket cannot be detached in place
                p.grad.requires_grad_(False).zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backward of the scaled loss in float32; then unscaled gradients on the masters, unless told not to."""
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the gradients to the masters and unscale them; on an overflow leave them and set ``overflow``."""
        singles = self.all_fp32_from_fp32_params
        if self.dynamic_loss_scale:
            self.overflow = self.loss_scaler.has_overflow([*self.all_fp16_params, *singles])
            if self.overflow:
                return
        self._model_grads_to_master_grads()
        if self.loss_scale != 1.0:
            for p in (*self.all_fp32_from_fp16_params, *singles):
                if p.grad is not None:
                    p.grad.mul_(1.0 / self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clip the masters' gradients by total norm; returns the norm before, or -1 after an overflow."""
        if self.overflow:
            return -1
        return nn.utils.clip_grad_norm_(self._master_params(), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The masters' gradients by parameter group, or None after an overflow."""
        if self.overflow:
            say("Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.")
            return None
        return [[p.grad for p in g["params"]] for g in self.optimizer.param_groups]

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step the masters and copy them to the model, or skip after an overflow.

        With ``closure`` (which must call this object's ``backward``), backward is done again at a lower scale until
        there is no overflow, as in apex.
        """
        scale = self.loss_scale
        if closure is None:
            self.loss_scaler.update_scale(self.overflow)
            if self.overflow:
                self._say(f"OVERFLOW! Skipping step. Attempted loss scale: {scale}, reducing to {self.loss_scale}")
                return None
            result = self.optimizer.step()
        else:
            result = self._step_with_closure(closure)
        self._master_params_to_model_params()
        return result

    def _step_with_closure(self, closure: Callable[[], object]) -> object:
        def evaluate() -> Any:
            # A second call within a step: the optimizer moved the masters, and the model must see where.
            if not self.first_closure_call_this_step:
                self._master_params_to_model_params()
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                scale = self.loss_scale
                self.loss_scaler.update_scale(True)
                if self.loss_scale == scale == getattr(self.loss_scaler, "min_scale", scale):
                    raise RuntimeError(
                        f"FP16_Optimizer.step(closure) at loss scale {scale} - gradients still overflow at the "
                        "smallest scale - the loss itself is not finite: look for the NaN there."
                    )
                self._say(f"OVERFLOW within closure! Skipping step. Attempted loss scale: {scale}")
                loss = closure()
            self.loss_scaler.update_scale(False)
            return loss

        self.first_closure_call_this_step = True
        try:
            return self.optimizer.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def state_dict(self) -> StateDict:
        """Apex's keys; ``loss_scaler`` is a dict of numbers, so that ``torch.load(weights_only=True)`` reads it."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what :meth:`state_dict` gave; a checkpoint of apex, with a scaler object in it, loads as well.

        The scaler is then of the checkpoint's generation, which one line says.
        """
        if "fp32_from_fp16" not in state_dict:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict got a dict of {sorted(state_dict)} - fp16_utils.FP16_Optimizer saves"
                " fp32_from_fp16 - load it into the class that wrote it; with cur_scale, that is the FP16_Optimizer of"
                " apex.contrib.optimizers."
            )
        saved = [p for g in state_dict["fp32_from_fp16"] for p in g]
        masters = self.all_fp32_from_fp16_params
        if [p.shape for p in saved] != [p.shape for p in masters]:
            raise ValueError(
                f"{len(saved)} saved masters for {len(masters)} masters here - their shapes must match one by one - "
                "load the checkpoint of this model."
            )
        scaler = restored_scaler(state_dict["loss_scaler"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler = scaler
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        for master, value in zip(masters, saved, strict=True):
            master.copy_(value)
        when = "since March 2019" if isinstance(scaler, CallableLossScaler) else "before March 2019"
        self._say(f"FP16_Optimizer: loaded a loss scale of {self.loss_scale}, in the form that apex had {when}")

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = float(value)

    @property
    def state(self) -> ParamState:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: ParamState) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of the wrapped optimizer, holding the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[ParamGroup]) -> None:
        self.optimizer.param_groups = value
