"""Share apex's ``step``, ``zero_grad`` and checkpoints among the fused optimizers, around an update rule each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat import _torch
from ampcompat._torch import Tensors
from ampcompat._types import ParamGroup
from ampcompat.multi_tensor_apply._rules import Hyper, usable
from ampcompat.multi_tensor_apply._working import WorkingCopies, by_math_kind, math_dtype
from ampcompat.optimizers._saved_forms import in_own_form
from ampcompat.optimizers._steps import StepCounts

R = TypeVar("R")


@dataclass(frozen=True)
class Scaling:
    """Carry what a scaler says of the gradients of a step.

    Attributes:
        found_inf: 0-dim float32, 1 after an overflow, or None.
        grad_scale: 0-dim, what the gradients are still multiplied by, or None.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @classmethod
    def of(cls, found_inf: Tensor | None, grad_scale: Tensor | None) -> Scaling:
        """Make 1 of a sum of the flags of several devices: torch's fused kernels skip at exactly 1."""
        if found_inf is not None:
            found_inf = (found_inf != 0).to(torch.float32).reshape(())
        return cls(found_inf, grad_scale)

    def on(self, device: torch.device) -> Scaling:
        """Return the same as float32 on ``device``; no host sync."""

        def moved(value: Tensor | None) -> Tensor | None:
            return None if value is None else _torch.moved_to(device, value, torch.float32).reshape(())

        return Scaling(moved(self.found_inf), moved(self.grad_scale))


@dataclass
class Bucket:
    """Params of one group, device and math dtype that have gradients, ready for an update rule.

    Attributes:
        params, grads: Working copies, or the tensors themselves where they will do.
        state: The same of the state, by its names.
        hyper: Hyperparameters of the group, for this step.
        dtypes: Dtypes of the params as the caller holds them.
        is_new: Which params take their first step.
        grad_scale: 0-dim float32 on the device of the bucket, or None.
    """

    params: list[Tensor]
    grads: Tensors
    state: dict[str, list[Tensor]]
    hyper: Hyper
    dtypes: list[torch.dtype]
    is_new: list[bool]
    grad_scale: Tensor | None

    def make_usable(self) -> None:
        """Take the scale out of the gradients, and the overflow, for rules that leave both to us."""
        self.grads = usable(self.grads, self.grad_scale, self.hyper.found_inf)
        self.grad_scale = None


class FusedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose params are updated together, computed in float32 for half params.

    Kernels are launched for some dozens of params at once; rules that scale each layer launch one more a param (LAMB,
    NovoGrad), and float32 masters of the optimizer's own three.

    Params and state are rounded once, where they are stored, in the dtypes that apex stored them in: state has the
    dtype of its param (``torch.zeros_like(p)``) where a subclass does not say otherwise. ``step`` makes no host
    synchronisation. It honours ``found_inf`` and ``grad_scale`` as torch's ``fused=True`` does: 0-dim float32 tensors
    set on the optimizer; gradients are divided by ``grad_scale``, and where ``found_inf`` is not 0 the step changes
    nothing, the step count included. The count is an int in ``group["step"]``, as in apex
    (:class:`~ampcompat.optimizers._steps.StepCounts`).

    Subclasses whose ``step`` is their own find in each optimizer what apex's had: the functions of
    :mod:`ampcompat.amp_C` that it called, and ``_dummy_overflow_buf``, a flag to call them with.
    """

    _step_supports_amp_scaling: Any = True

    capturable = False
    """Whether steps are counted on the device, for CUDA graphs, where no ``found_inf`` makes it necessary."""
    _state_names: ClassVar[tuple[str, ...]]
    _state_of_layers: ClassVar[frozenset[str]] = frozenset()
    """State that is one float32 number a param."""
    _kept: ClassVar[tuple[str, ...]] = ("set_grad_none", "capturable")
    """Attributes that a copy or a pickle carries beyond ``torch.optim.Optimizer``'s own."""
    _counts_steps: ClassVar[bool] = True
    """Whether ``group["step"]`` counts the steps."""
    _rule_unscales: ClassVar[bool] = False
    """Whether the rule takes ``grad_scale`` and ``found_inf``; else it gets gradients without either."""
    _reads_whole_params: ClassVar[bool] = False
    """Whether the rule reads norms of layers, which a shard does not have."""
    _reads: ClassVar[str]
    """The row of :data:`._saved_forms.READS` that says which saved states it loads."""

    def __init__(self, params: Any, set_grad_none: bool, amsgrad: bool = False, **defaults: object) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{type(self).__name__} does not support the AMSGrad variant (amsgrad=True): leave the argument out, "
                "or use torch.optim.AdamW(..., amsgrad=True, fused=True)."
            )
        self.set_grad_none = set_grad_none
        self._steps = StepCounts()
        super().__init__(params, defaults)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        has_own_step = not cls.step.__module__.startswith("ampcompat.")  # its own, or that of a mixin
        if not has_own_step:
            return
        # That step does not read `found_inf`, so that the host must look at the flag.
        takes_scaler = "grad_scaler" in inspect.signature(cls.step).parameters
        cls._step_supports_amp_scaling = property(_is_not_amps) if takes_scaler else False

    @cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """A flag for the functions of ``amp_C``, not set: int32, ``[1]``, on the device of the first param."""
        devices = (param.device for group in self.param_groups for param in group["params"])
        return torch.zeros(1, dtype=torch.int32, device=next(devices, torch.device("cpu")))

    # --- what a subclass says -----------------------------------------------------------------------------------------

    @property
    def _decoupled(self) -> bool:
        """Whether the weight decay is added to the update instead of to the gradient."""
        return False

    def _names(self, group: ParamGroup) -> tuple[str, ...]:
        """Name the state that params of ``group`` need."""
        return self._state_names

    def _state_dtype(self, name: str, param: Tensor) -> torch.dtype:
        """Return the dtype in which state of ``param`` is stored, in checkpoints too."""
        of_master = name == "master_param" or self._keeps_master(param)
        return math_dtype(param.dtype) if of_master or name in self._state_of_layers else param.dtype

    def _new_state(self, name: str, param: Tensor, group: ParamGroup) -> Tensor:
        """Return state of a param before its first step: zeros."""
        return torch.zeros_like(param, dtype=self._state_dtype(name, param))

    def _keeps_master(self, param: Tensor) -> bool:
        """Return whether a float32 master of ``param`` is kept in ``state[param]["master_param"]``."""
        return False

    def _update(self, group: ParamGroup, bucket: Bucket) -> None:
        """Apply the rule to a bucket."""
        raise NotImplementedError

    def _before_updates(self, scaling: Scaling) -> None:
        """Look at the gradients of all groups before the first update."""

    # --- step ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Update the params.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: A gradient is sparse, a param is complex, or the step is captured for a CUDA graph before any
                was counted on the device (:attr:`capturable`); nothing has been changed then.
        """
        loss = evaluated(closure)
        self._make_step(self._scaling())
        return loss

    def _make_step(self, scaling: Scaling) -> None:
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        refuse_unsupported(type(self).__name__, params, self._reads_whole_params)
        if self._counts_steps:
            self._count_step(scaling.found_inf)
        self._before_updates(scaling)
        for group in self.param_groups:
            for bucket, copies in self._buckets(group, scaling):
                self._update(group, bucket)
                copies.write_back()

    def _count_step(self, found_inf: Tensor | None) -> None:
        if _torch.is_capturing() and not self._steps.are_on_device(self.param_groups):
            name = type(self).__name__
            raise RuntimeError(
                f"{name}.step() is captured for a CUDA graph while its steps are counted on the host - each replay"
                " would repeat the count of this one - set optimizer.capturable = True, and make a step before the"
                " capture."
            )
        self._steps.advance(self.param_groups, found_inf, self.capturable)

    def _step_of(self, group: ParamGroup, device: torch.device) -> int | Tensor:
        return self._steps.of(group, device)

    def _scaling(self) -> Scaling:
        # Set and deleted around a step; torch's GradScaler takes a standing None for a scale to multiply by.
        return Scaling.of(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))

    def _buckets(self, group: ParamGroup, scaling: Scaling) -> Iterator[tuple[Bucket, WorkingCopies]]:
        with_grads = [p for p in group["params"] if p.grad is not None and _torch.local_part(p).numel()]
        for params in by_math_kind(with_grads):
            copies = WorkingCopies()
            yield self._bucket(group, params, scaling.on(params[0].device), copies), copies

    def _bucket(self, group: ParamGroup, params: list[Tensor], scaling: Scaling, copies: WorkingCopies) -> Bucket:
        """Make a bucket of ``params``, of one device and math dtype, from what ``copies`` lends."""
        is_new = self._add_missing_state(group, params)
        working = self._working_params(params, copies)
        grads = [_torch.local_part(param.grad) for param in params if param.grad is not None]
        state: dict[str, list[Tensor]] = {}
        for name in self._names(group):
            values = [_torch.local_part(self.state[param][name]) for param in params]
            if name not in self._state_of_layers:
                values = copies.lend(values, like=working, changes=True)
            state[name] = values
        bucket = Bucket(
            params=working,
            grads=copies.lend(grads, like=working),
            state=state,
            hyper=Hyper.of(
                group,
                step=self._step_of(group, params[0].device),
                decoupled=self._decoupled,
                found_inf=scaling.found_inf,
            ),
            dtypes=[param.dtype for param in params],
            is_new=is_new,
            grad_scale=scaling.grad_scale,
        )
        if not self._rule_unscales:
            bucket.make_usable()
        return bucket

    def _add_missing_state(self, group: ParamGroup, params: list[Tensor]) -> list[bool]:
        """Make the state that ``params`` lack; return which of them lacked some."""
        is_new: list[bool] = []
        for param in params:
            state = self.state[param]
            missing = [name for name in self._names(group) if state.get(name) is None]
            for name in missing:
                state[name] = self._new_state(name, param, group)
            is_new.append(bool(missing))
        return is_new

    def _working_params(self, params: list[Tensor], copies: WorkingCopies) -> list[Tensor]:
        """Lend ``params``, with the low bits of the masters of those that have one."""
        # Of a shard the rule sees what lies on this rank.
        working = copies.params(list(map(_torch.local_part, params)))
        stale: list[Tensor] = []
        exact: list[Tensor] = []
        for param, copy in zip(params, working, strict=True):
            if not self._keeps_master(param):
                continue
            state = self.state[param]
            master = state.get("master_param")
            if master is None:
                master = state["master_param"] = torch.empty_like(copy)
            else:
                stale.append(copy)
                # Where somebody else wrote the param its value counts, elsewhere the master's low bits are kept.
                exact.append(torch.where(master.to(param.dtype) == param, master, copy))
            copies.save(copy, to=master)
        _torch.foreach_copy_(stale, exact)
        return working

    # --- the rest of torch.optim.Optimizer ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None if ``set_to_none``; left out, as ``set_grad_none`` of the constructor says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def state_dict(self) -> StateDict:
        """Return what torch's does, with exact step counts: a host synchronisation if the device counts them."""
        self._steps.make_exact()
        return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load as torch's does, but keep float32 state of half params, where torch rounds it to their dtype.

        State that another optimizer wrote is converted where that is exact: docs/resume.md has the table.

        Raises:
            ValueError: Another optimizer's state that is not converted, or torch's own; nothing has been changed then.
        """
        state_dict = self._in_own_form(state_dict)
        super().load_state_dict(state_dict)
        load_state_in(self, state_dict, self._state_dtype)
        for group in self.param_groups:
            self._load_group(group)

    def _in_own_form(self, state_dict: StateDict) -> StateDict:
        """Return ``state_dict`` with the names that this optimizer writes."""
        return in_own_form(self, self._reads, state_dict, "in groups" if self._counts_steps else "not at all")

    def _load_group(self, group: ParamGroup) -> None:
        if "step" in group:  # a tensor in checkpoints of apex's FusedAdam(capturable=True)
            group["step"] = int(group["step"])

    def __getstate__(self) -> dict[str, object]:
        self._steps.make_exact()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._steps = StepCounts()
        super().__setstate__(state)


def _is_not_amps(optimizer: FusedOptimizer) -> bool:
    """Return whether a step that takes a ``grad_scaler`` gets one: ``GradScaler`` passes itself, amp passes none."""
    return not hasattr(optimizer, "_amp_stash")


def load_state_in(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, dtype_of: Callable[[str, Tensor], torch.dtype]
) -> None:
    """Load floating state once more, in dtypes of its own: torch's loader has rounded it to that of the param.

    Args:
        optimizer: It has loaded ``state_dict``.
        state_dict: What it loaded.
        dtype_of: The dtype of state, from its name and its param.
    """
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, param in zip(keys, params, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                optimizer.state[param][name] = value.to(param.device, dtype_of(name, param), copy=True)


def evaluated(closure: Callable[[], R] | None) -> R | None:
    """Return what ``closure`` returns, called with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_unsupported(optimizer: str, params: Iterable[Tensor], reads_whole_params: bool) -> None:
    """Raise for a param that no rule of ``optimizer`` (a name) can update; params without gradients are left alone.

    ``reads_whole_params``: A rule reads norms of layers, which a shard does not have.
    """
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse:
            raise RuntimeError(
                f"{optimizer} does not support sparse gradients - a param of shape {tuple(param.shape)} has one -"
                " build its embedding with sparse=False, or give it to torch.optim.SparseAdam."
            )
        if reads_whole_params and _torch.is_sharded(param):
            raise RuntimeError(
                f"{optimizer} got a param of shape {tuple(param.shape)} that fully_shard has sharded - its rule reads"
                " the norms of whole layers, of which each rank has a part - use FusedAdam, FusedSGD, FusedAdagrad"
                " or an optimizer of torch.optim."
            )
        if not param.is_floating_point():
            raise RuntimeError(
                f"{optimizer} only supports floating-point params, and one of shape {tuple(param.shape)} is "
                f"{param.dtype}: leave it to an optimizer of torch.optim."
            )
