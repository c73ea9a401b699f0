"""FusedMixedPrecisionLamb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat import _torch
from ampcompat._types import ParamGroup, Params
from ampcompat.multi_tensor_apply.lamb import multi_tensor_lamb_mp
from ampcompat.multi_tensor_apply.norms import multi_tensor_l2norm_mp
from ampcompat.optimizers._base import Scaling, evaluated
from ampcompat.optimizers.fused_lamb import FusedLAMB

_TENSORS = {"lr": torch.float32, "step": torch.int32}


class FusedMixedPrecisionLamb(FusedLAMB):
    """Run LAMB with float32 masters of half params, learning rate and step on the device.

    Reproduces ``apex/optimizers/fused_mixed_precision_lamb.py: FusedMixedPrecisionLamb``. ``group["lr"]`` (float32,
    0-dim) and ``group["step"]`` (int32, ``[1]``) are tensors on the device of the group's first param, so that a CUDA
    graph of the step replays. For use with ``torch.amp.GradScaler`` and a half model, without :mod:`ampcompat.amp`.

    Args:
        params: Params or groups.
        step: Steps made before.
        lr, bias_correction, betas, eps, weight_decay, amsgrad: As of :class:`~ampcompat.optimizers.FusedAdam`.
        adam_w_mode: Decoupled weight decay; False adds it to the gradient (L2).
        grad_averaging: Weigh the gradient by ``1 - betas[0]`` in the first moment.
        max_grad_norm: Clip the gradients of all groups together to this norm; None or 0 does not.
        use_nvlamb: Scale by the trust ratio in groups without weight decay, too.
        reduced_precision_dtype: Keep float32 masters of params of this dtype, made in the first step. None keeps none.

    State: ``exp_avg``, ``exp_avg_sq`` and ``master_param`` a param, float32 where there is a master. apex did not save
    its masters: a resumed run began again from rounded weights. Checkpoints of apex load.

    Raises:
        RuntimeError: ``amsgrad=True``.
    """

    _kept = (*FusedLAMB._kept, "reduced_precision_dtype", "_first_step")
    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm_mp)
    multi_tensor_lamb = staticmethod(multi_tensor_lamb_mp)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self.reduced_precision_dtype = reduced_precision_dtype
        self._first_step = step
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """Return a dict a group whose ``"params"`` are the masters, None for params without."""
        none: dict[str, Tensor] = {}
        return [
            {"params": [self.state.get(param, none).get("master_param") for param in group["params"]]}
            for group in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        """Update the params; see :meth:`FusedOptimizer.step`.

        Args:
            closure: As there.
            grad_scaler: Divide by its scale, unless it has unscaled the gradients already, and skip the step on the
                device if they overflowed. ``grad_scaler.step(optimizer)`` passes itself.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: As there.
        """
        loss = evaluated(closure)
        scaling = self._scaling() if grad_scaler is None else Scaling.of(*_torch.found_inf_and_scale(grad_scaler, self))
        self._make_step(scaling)
        return loss

    def _keeps_master(self, param: Tensor) -> bool:
        return param.dtype == self.reduced_precision_dtype != torch.float32

    def _count_step(self, found_inf: Tensor | None) -> None:
        for group in self.param_groups:
            self._hold_as_tensors(group)
            step = group["step"]
            step.add_(1 if found_inf is None else _torch.moved_to(step.device, found_inf == 0, step.dtype))

    def _step_of(self, group: ParamGroup, device: torch.device) -> int | Tensor:
        step: Tensor = _torch.moved_to(device, group["step"], torch.float32)
        return step.reshape(())

    def _hold_as_tensors(self, group: ParamGroup) -> None:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for name, dtype in _TENSORS.items():
            value = group[name]
            if isinstance(value, Tensor):
                group[name] = value.to(device, dtype)
            else:  # made on the device: a copy from the host would be a host sync
                group[name] = torch.full((1,) if name == "step" else (), value, dtype=dtype, device=device)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, with a learning rate and a step of its own, which start at the constructor's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step", self._first_step)
        for name in _TENSORS:
            if isinstance(group[name], Tensor):
                group[name] = group[name].clone()
        self._hold_as_tensors(group)

    def _load_group(self, group: ParamGroup) -> None:
        group.setdefault("step", self._first_step)
        self._hold_as_tensors(group)

    def state_dict(self) -> StateDict:
        """Return what torch's does, with copies of the tensors in the groups; no host synchronisation."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update({name: group[name].clone() for name in _TENSORS})
        return saved
