"""LARC: layer-wise adaptive rate clipping around another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat import _torch
from ampcompat._types import ParamGroup, ParamState
from ampcompat.multi_tensor_apply._layerwise import norms
from ampcompat.multi_tensor_apply._working import WorkingCopies, by_math_kind
from ampcompat.optimizers._base import evaluated, refuse_unsupported


class LARC(torch.optim.Optimizer):
    """Scale each param's gradient by ``trust_coefficient * norm(param) / norm(grad)``, then step ``optimizer``.

    Reproduces ``apex/parallel/LARC.py: LARC``. With ``clip`` the resulting rate is ``min(local rate, lr)``, without it
    (LARS) ``local rate * lr``. The weight decay of ``optimizer`` is applied here, inside the scaled gradient; a param
    whose weights or gradient are all zero is left to ``optimizer`` without decay. Gradients are changed in place, as in
    apex. Each layer's rate is a kernel launch; the rest takes a few for all layers. No host synchronisation of its own.

    It shares ``param_groups``, ``state`` and everything else with ``optimizer``, so either may be given to a
    learning-rate scheduler; give this one to ``amp.initialize`` and ``amp.scale_loss``.

    Args:
        optimizer: The optimizer to wrap, an instance.
        trust_coefficient: Trust coefficient.
        clip: Clip the rate to ``lr``.
        eps: Added to the denominator.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
    """

    optim: torch.optim.Optimizer

    # amp would set them here, where the wrapped optimizer does not look.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Not Optimizer.__init__: groups and state are those of the wrapped optimizer.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"LARC wraps an optimizer, not {type(optimizer).__name__}: build one first, "
                "LARC(torch.optim.SGD(model.parameters(), lr=0.1))."
            )
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Scale the gradients and step the wrapped optimizer.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: A gradient is sparse, or a param is complex or sharded; nothing has been changed then.
        """
        loss = evaluated(closure)
        prepare = getattr(self.optim, "_amp_prepare_masters", None)
        if prepare is not None:  # amp: gradients unscaled, masters as the model is
            prepare()
        groups = self.optim.param_groups
        refuse_unsupported("LARC", chain.from_iterable(group["params"] for group in groups), reads_whole_params=True)
        decays = [group.get("weight_decay") for group in groups]
        try:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = 0.0
                with_grads = [param for param in group["params"] if param.grad is not None]
                for params in by_math_kind(with_grads):
                    self._scale_grads_of(params, decay or 0.0, group["lr"])
            self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return loss

    def _scale_grads_of(self, params: Sequence[Tensor], decay: float, lr: float | Tensor) -> None:
        # In float32: a float16 norm overflows at 65504, and so does a gradient on its way to being scaled down.
        weights = WorkingCopies().params(params)
        copies = WorkingCopies()
        grads = copies.lend([param.grad for param in params if param.grad is not None], like=weights, changes=True)
        weight_norms = norms(weights)
        grad_norms = norms(grads)
        rates = self.trust_coefficient * weight_norms / (grad_norms + weight_norms * decay + self.eps)
        if self.clip:
            rates = (rates / lr).clamp(max=1.0)
        # Zeros have no rate: a decay of zero weights adds nothing, and a gradient of zeros stays one.
        rates = torch.where(weight_norms == 0, 1.0, rates)
        rates = torch.where(grad_norms == 0, 0.0, rates)
        _torch.foreach_add_(grads, _torch.foreach_mul(weights, decay))
        _torch.foreach_mul_(grads, list(rates.unbind()))
        copies.write_back()

    # --- all else is the wrapped optimizer's --------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Return the groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[ParamGroup]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> ParamState:
        """Return the state of the wrapped optimizer."""
        return self.optim.state

    @state.setter
    def state(self, value: ParamState) -> None:
        self.optim.state = value

    @property
    def _opt_called(self) -> bool:
        # Schedulers look here for a first step and amp notes a skipped one: either may hold the other object.
        return bool(getattr(self.optim, "_opt_called", False))

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        self.optim._opt_called = value  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name in ("optim", "found_inf", "grad_scale") or name.startswith("_amp"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optim, name)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients as the wrapped optimizer does; left out, its own default applies."""
        if set_to_none is None:
            self.optim.zero_grad()
        else:
            self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> StateDict:
        """Return the wrapped optimizer's, which it may be loaded into."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, object]:
        kept = ("optim", "trust_coefficient", "clip", "eps")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"LARC(trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}, {self.optim!r})"
