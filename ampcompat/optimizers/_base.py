"""What the five optimizers share: apex's ``step``, ``zero_grad`` and checkpoints around an update rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampcompat.optimizers._rules import Tensors, usable
from ampcompat.optimizers._working import WorkingCopies, math_dtype


@dataclass
class Bucket:
    """Params of one group, device and math dtype that have gradients, ready for an update rule.

    Attributes:
        params, grads, state: Working copies, or the tensors themselves where they will do.
        is_new: Which params take their first step.
        copies: Where the working copies go back.
        found_inf, grad_scale: 0-dim float32 on the device of the bucket, or None.
    """

    params: list[Tensor]
    grads: Tensors
    is_new: list[bool]
    copies: WorkingCopies
    found_inf: Tensor | None
    grad_scale: Tensor | None
    state: dict[str, list[Tensor]] = field(default_factory=dict)

    def make_usable(self) -> None:
        """Take the scale out of the gradients, and the overflow, for rules that leave both to us."""
        self.grads = usable(self.grads, self.grad_scale, self.found_inf)
        self.grad_scale = None


class FusedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose params are updated in a few launches, computed in float32 for half params.

    State is float32 (float64 for float64 params) whatever the dtype of the params, in checkpoints too. ``step`` makes
    no host synchronisation. It honours ``found_inf`` and ``grad_scale`` as torch's ``fused=True`` does: 0-dim float32
    tensors set on the optimizer; gradients are divided by ``grad_scale``, and where ``found_inf`` is not 0 the step
    changes nothing, the step count included. The count lives in ``group["step"]``, as in apex: an int, on the device
    as a tensor once ``found_inf`` was used, an int again in ``state_dict()`` (which then synchronises).
    """

    _step_supports_amp_scaling: Any = True

    capturable = False
    _state_names: ClassVar[tuple[str, ...]]
    _kept: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Attributes that a copy or a pickle carries beyond ``torch.optim.Optimizer``'s own."""
    _counts_steps: ClassVar[bool] = True
    _state_is_like_params: ClassVar[bool] = True
    _rule_unscales: ClassVar[bool] = False

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    # --- what a subclass says -----------------------------------------------------------------------------------------

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the state that params of ``group`` need."""
        return self._state_names

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of a param before its first step, by apex's names: zeros like the param, unless a subclass differs."""
        return {name: torch.zeros_like(param, dtype=math_dtype(param.dtype)) for name in self._state_names}

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        """Apply the rule to a bucket."""
        raise NotImplementedError

    def _before_updates(self) -> None:
        """Look at the gradients of all groups before the first update."""

    # --- step ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the params.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: A gradient is sparse, or a param is complex; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_what_no_kernel_takes()
        for group in self.param_groups:
            if self._counts_steps and group["params"]:
                self._count(group)
        self._before_updates()
        for group in self.param_groups:
            for bucket in self._buckets(group):
                self._update(group, bucket)
                bucket.copies.write_back()
        return loss

    def _refuse_what_no_kernel_takes(self) -> None:
        name = type(self).__name__
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(
                    f"{name} does not support sparse gradients, and a param of shape {tuple(param.shape)} has one: "
                    "please consider torch.optim.SparseAdam for it, or build its embedding with sparse=False."
                )
            if not param.is_floating_point():
                raise RuntimeError(
                    f"{name} only supports floating-point params, and one of shape {tuple(param.shape)} is "
                    f"{param.dtype}: leave it to an optimizer of torch.optim."
                )

    def _count(self, group: dict[str, Any]) -> None:
        step, found_inf = group.get("step", 0), self._from_scaler("found_inf")
        device = group["params"][0].device
        if found_inf is not None or self.capturable or isinstance(step, Tensor):
            if not isinstance(step, Tensor):  # as a tensor of the host it would have to be copied: a host sync
                step = torch.full((), float(step), dtype=torch.float32, device=device)
            step = step.to(device, torch.float32)
            step.add_(1.0 if found_inf is None else 1.0 - found_inf.to(device).reshape(()))
            group["step"] = step
        else:
            group["step"] = step + 1

    def _from_scaler(self, name: str) -> Tensor | None:
        # Set and deleted around a step; torch's GradScaler takes a standing None for a scale to multiply by.
        value: Tensor | None = getattr(self, name, None)
        if value is not None and name == "found_inf":
            # torch sums the flags of several devices; its fused kernels skip at exactly 1.
            value = (value != 0).to(torch.float32)
        return value

    def _buckets(self, group: dict[str, Any]) -> Iterator[Bucket]:
        names = self._names(group)
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None and param.numel():
                by_kind.setdefault((param.device, math_dtype(param.dtype)), []).append(param)
        for (device, _), owners in by_kind.items():
            is_new: list[bool] = []
            for param in owners:
                state = self.state[param]
                is_new.append(any(state.get(name) is None for name in names))
                if is_new[-1]:
                    state.update({k: v for k, v in self._new_state(param, group).items() if state.get(k) is None})
            copies = WorkingCopies()
            params = self._working_params(owners, copies)
            bucket = Bucket(
                params=params,
                grads=copies.lend([param.grad for param in owners if param.grad is not None], like=params),
                is_new=is_new,
                copies=copies,
                found_inf=_on(device, self._from_scaler("found_inf")),
                grad_scale=_on(device, self._from_scaler("grad_scale")),
            )
            for name in names:
                kept = [self.state[param][name] for param in owners]
                if self._state_is_like_params:
                    kept = copies.lend(kept, like=params, changes=True)
                bucket.state[name] = kept
            if not self._rule_unscales:
                bucket.make_usable()
            yield bucket

    def _working_params(self, owners: list[Tensor], copies: WorkingCopies) -> list[Tensor]:
        return copies.params(owners)

    # --- the rest of torch.optim.Optimizer ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None if ``set_to_none``; left out, as ``set_grad_none`` of the constructor says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; ``step`` of each group is an int (a host synchronisation a group if counted on the device)."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if isinstance(group.get("step"), Tensor):
                group["step"] = int(group["step"].item())
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state of half params stays float32, where torch rounds it to the dtype of the param."""
        super().load_state_dict(state_dict)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(keys, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.state[param][name] = value.to(param.device, math_dtype(param.dtype), copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}


def _on(device: torch.device, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(device, torch.float32, non_blocking=True).reshape(())
