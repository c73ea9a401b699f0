"""``FP16_Optimizer`` as ``apex.optimizers`` had it until 2019, and ``apex.contrib.optimizers`` after."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat._log import say
from ampcompat._types import HALF_DTYPES, ParamGroup, ParamState
from ampcompat.multi_tensor_apply.norms import multi_tensor_l2norm
from ampcompat.optimizers._fp16_checkpoints import does_not_fit, from_flat_masters, from_version_010
from ampcompat.optimizers.fused_adam import FusedAdam


class FP16_Optimizer:
    """Step float32 masters by the model's scaled half gradients, for the contributed ``FusedAdam`` and ``FusedSGD``.

    Reproduces ``apex/contrib/optimizers/fp16_optimizer.py: FP16_Optimizer``. It differs from
    :class:`ampcompat.fp16_utils.FP16_Optimizer`: masters have no gradients, so that there is nothing to clip but by
    ``max_grad_norm`` of the optimizer inside; every parameter has a master, float32 ones too; overflows are found in
    :meth:`step`, at static scales too; and its checkpoints have other keys.

    Args:
        init_optimizer: Optimizer over half and float32 parameters. If its ``step`` takes ``grads``,
            ``output_params``, ``scale`` and ``grad_norms``, it gets those; any other optimizer steps masters that have
            unscaled float32 gradients meanwhile.
        static_loss_scale: Fixed loss scale.
        dynamic_loss_scale: Let the scale move: from 2^16, halved down to 1 at an overflow, doubled after 1000 steps
            without one.
        dynamic_loss_args: None, as in apex.
        verbose: Say which steps are skipped at a dynamic scale, on rank 0; at a static one that is always said.

    Attributes:
        cur_scale, cur_iter, last_overflow_iter, scale_factor, scale_window: The loss scale and what moves it; scripts
            may write to them.
        fp16_groups: The model's parameters, a list for each group.
        fp32_groups: Their masters.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer, or a parameter is neither half nor float32.
        ValueError: ``dynamic_loss_args`` for a dynamic scale.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"init_optimizer={type(init_optimizer).__name__} - FP16_Optimizer wraps a torch optimizer - "
                "build the optimizer first and pass it."
            )
        for group in init_optimizer.param_groups:
            for param in group["params"]:
                if param.dtype not in (*HALF_DTYPES, torch.float32):
                    raise TypeError(
                        f"A parameter of {param.dtype} - only float16, bfloat16 and float32 - cast it first."
                    )
        if dynamic_loss_scale and dynamic_loss_args is not None:
            raise ValueError(
                f"dynamic_loss_args={dynamic_loss_args!r} - this FP16_Optimizer takes none, as in apex - set cur_scale,"
                " scale_factor or scale_window on it, or use fp16_utils.FP16_Optimizer."
            )
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale = 2.0**16 if dynamic_loss_scale else static_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = 1000
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self._replace_by_masters(group)

    def _replace_by_masters(self, group: ParamGroup) -> None:
        params = list(group["params"])
        masters = [param.detach().to(torch.float32, copy=True) for param in params]
        for param, master in zip(params, masters, strict=True):
            if param in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(param)
        group["params"] = masters
        self.fp16_groups.append(params)
        self.fp32_groups.append(masters)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clear the gradients of the model's parameters; masters have none."""
        for param in (param for group in self.fp16_groups for param in group):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()

    def backward(self, loss: Tensor) -> None:
        """Backward of the scaled loss in float32; the model's gradients stay scaled."""
        (loss.float() * self.cur_scale).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the masters and copy them to the model, or skip after an overflow; one host sync a group.

        Raises:
            RuntimeError: A closure was passed. apex did not call it.
        """
        if closure is not None:
            raise RuntimeError(
                "FP16_Optimizer.step got a closure - this one takes none, as in apex - call step() after backward(), or"
                " use fp16_utils.FP16_Optimizer, which takes one."
            )
        grads = [[param.grad for param in group] for group in self.fp16_groups]
        norms: list[Tensor | None] = []
        overflow = False
        for group in grads:
            norm, is_finite = _norm([grad for grad in group if grad is not None])
            norms.append(norm)
            overflow = overflow or not is_finite
        if not overflow:
            self._step_masters(grads, norms)
        self._update_scale(overflow)

    def _step_masters(self, grads: list[list[Tensor | None]], norms: list[Tensor | None]) -> None:
        if self._hands_gradients_over():
            step: Callable[..., object] = self.optimizer.step
            step(grads=grads, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=norms)
            return
        pairs = [
            pair
            for params, masters in zip(self.fp16_groups, self.fp32_groups, strict=True)
            for pair in zip(params, masters, strict=True)
        ]
        for param, master in pairs:
            master.grad = None if param.grad is None else param.grad.float() / self.cur_scale
        self.optimizer.step()
        for param, master in pairs:
            param.copy_(master)
            master.grad = None

    def _hands_gradients_over(self) -> bool:
        """Return whether the optimizer takes gradients from outside."""
        if isinstance(self.optimizer, FusedAdam):  # it names them to refuse them
            return False
        return "output_params" in inspect.signature(self.optimizer.step).parameters

    def _update_scale(self, skip: bool) -> None:
        kind = "dynamic" if self.dynamic_loss_scale else "static"
        if skip and (self.verbose or not self.dynamic_loss_scale):
            say(f"Grad overflow on iteration {self.cur_iter}\nUsing {kind} loss scale of {self.cur_scale}")
        if self.dynamic_loss_scale and skip:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif self.dynamic_loss_scale and (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def state_dict(self) -> StateDict:
        """Return apex's keys; the masters are the tensors themselves."""
        saved: StateDict = {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
        }
        if self.dynamic_loss_scale:
            saved["last_overflow_iter"] = self.last_overflow_iter
            saved["scale_factor"] = self.scale_factor
            saved["scale_window"] = self.scale_window
        saved["optimizer_state_dict"] = self.optimizer.state_dict()
        saved["fp32_groups"] = self.fp32_groups
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what :meth:`state_dict` gave; load the model, too.

        Checkpoints of apex from before December 2019, with one flat master a group (``fp32_groups_flat``), and of
        ampcompat 0.1.0 (``fp32_from_fp16``) load as well. Those of 0.1.0 have no masters of float32 parameters: load
        the model first.

        Raises:
            ValueError: It is none of these, or its masters do not fit; nothing has been changed then.
        """
        if "fp32_groups_flat" in state_dict:
            state_dict = from_flat_masters(state_dict, self.fp32_groups)
        elif "fp32_from_fp16" in state_dict:
            state_dict = from_version_010(state_dict, self.fp16_groups)
        elif "fp32_groups" not in state_dict:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict got a dict of {sorted(state_dict)} - a checkpoint has fp32_groups,"
                " fp32_groups_flat or fp32_from_fp16 - pass what state_dict() of an FP16_Optimizer returned."
            )
        saved_masters = state_dict["fp32_groups"]
        saved_shapes = [[tuple(master.shape) for master in group] for group in saved_masters]
        shapes = [[tuple(master.shape) for master in group] for group in self.fp32_groups]
        if saved_shapes != shapes:
            raise does_not_fit("shapes", saved_shapes, shapes)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for masters, saved_group in zip(self.fp32_groups, saved_masters, strict=True):
            for master, saved in zip(masters, saved_group, strict=True):
                master.copy_(saved)
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.cur_scale = state_dict["cur_scale"]
        self.cur_iter = state_dict["cur_iter"]
        if self.dynamic_loss_scale:
            self.last_overflow_iter = state_dict["last_overflow_iter"]
            self.scale_factor = state_dict["scale_factor"]
            self.scale_window = state_dict["scale_window"]

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


def _norm(grads: list[Tensor]) -> tuple[Tensor | None, bool]:
    """Return the L2 norm of all gradients together, 0-dim float32, and whether all are finite (one host sync)."""
    if not grads:
        return None, True
    found_inf = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    norm = multi_tensor_l2norm(0, found_inf, [grads])[0].reshape(())
    return norm, not found_inf.item()
