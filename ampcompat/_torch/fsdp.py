"""``fully_shard`` (FSDP2): its units, the precision that they compute in, and gradients that they hold back.

A unit is what one call of ``fully_shard`` made: the parameters that are gathered together. Each is a ``DTensor``; this
rank keeps a shard of it in float32. torch has no public way to change the ``MixedPrecisionPolicy`` of a unit after that
call. The same attributes are there from 2.7 to 2.15: the state of the module holds the policy, so does each group of
parameters, or from 2.15 on each parameter; and what was gathered in the old precision is kept for the next time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version

from ampcompat._torch.version import TORCH

#: Before torch 2.7 ``fully_shard`` runs on CUDA alone: what is done here was never run there.
_RUNS_ON_CPU = Version("2.7") <= TORCH

_HOMES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module``. Imports nothing: torch.distributed.fsdp takes its time."""
    for name in _HOMES:
        kind = getattr(sys.modules.get(name), "FSDPModule", None)
        if kind is not None:
            return isinstance(module, kind)
    return False


class ShardedUnit:
    """What one call of ``fully_shard`` made; several modules share a unit where the call was given a list."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._state = module._get_fsdp_state()

    def same_as(self, other: ShardedUnit) -> bool:
        """Whether one call made both."""
        return self._state is other._state

    @property
    def _groups(self) -> list[Any]:
        several = vars(self._state).get("_fsdp_param_groups")
        if several is not None:
            return list(several)
        one = self._state._fsdp_param_group
        return [] if one is None else [one]

    def _params(self) -> list[Any]:
        return [param for group in self._groups for param in group.fsdp_params]

    def holders(self) -> list[tuple[torch.nn.Module, str]]:
        """The modules whose parameters the unit holds, and the name of each parameter there."""
        found = []
        for param in self._params():
            info = param._module_info
            found.append((info.module, info.param_name))
            found += zip(info.shared_modules, info.shared_param_names, strict=True)
        return found

    def shards(self) -> list[torch.Tensor]:
        """The parameters, as the optimizer holds them."""
        return [param.sharded_param for param in self._params()]

    def reshard(self) -> None:
        """Put the shards back into the modules, which hold whole parameters after a forward without a backward pass."""
        self.module.reshard()

    # -- precision -----------------------------------------------------------------------------------------------------
    @property
    def given_policy(self) -> Any:
        """The ``MixedPrecisionPolicy`` that ``fully_shard`` was given."""
        return vars(self._state).get("_amp_given_policy", self._state._mp_policy)

    @property
    def policy(self) -> Any:
        """The ``MixedPrecisionPolicy`` in force."""
        return self._state._mp_policy

    @property
    def can_change_policy(self) -> bool:
        """Whether this torch has what :meth:`set_policy` changes, and all parameters have one policy."""
        if not _RUNS_ON_CPU or not all(hasattr(group, "_init_mp_dtypes") for group in self._groups):
            return False
        for param in self._params():
            given = vars(param).get("mp_policy", self.policy)  # torch 2.15 can have another for each
            if given.param_dtype != self.policy.param_dtype or not hasattr(param, "all_gather_outputs"):
                return False
        return True

    def policy_for(self, dtype: torch.dtype | None) -> Any:
        """The given policy with parameters gathered in ``dtype``, and gradients reduced in float32 if none is given."""
        given = self.given_policy
        return replace(given, param_dtype=dtype, reduce_dtype=given.reduce_dtype or torch.float32)

    def set_policy(self, policy: Any) -> None:
        """Compute by ``policy`` from now on; gradients that are held back are dropped."""
        if policy == self._state._mp_policy:
            return
        self.reshard()
        vars(self._state).setdefault("_amp_given_policy", self._state._mp_policy)
        self._state._mp_policy = policy
        for group in self._groups:
            group.mp_policy = policy
            for param in group.fsdp_params:
                _clear_kept(group, param)
                param.mp_policy = policy
                # Both are made once, of the dtype that was gathered first.
                param.all_gather_outputs = []
                vars(param).pop("_unsharded_param", None)
            group._init_mp_dtypes()
        for param in self._params():
            if (param.param_dtype or param.orig_dtype) != (policy.param_dtype or param.orig_dtype):
                raise RuntimeError(f"torch {TORCH} did not take {policy} - compute in it without amp, or at O1.")

    # -- gradients -----------------------------------------------------------------------------------------------------
    def holds_back(self, params: set[int]) -> bool:
        """Whether the next backward pass keeps gradients of any of ``params`` (ids) from the other ranks."""
        for group in self._groups:
            if group.reduce_grads and (group.all_reduce_grads or not _reduces_twice(group)):
                continue
            if any(id(param.sharded_param) in params for param in group.fsdp_params):
                return True
        return False

    def kept_gradients(self, params: set[int]) -> list[torch.Tensor]:
        """The gradients of ``params`` (ids) that earlier backward passes have kept from other ranks."""
        found: list[torch.Tensor] = []
        for group in self._groups:
            held = [param for param in group.fsdp_params if id(param.sharded_param) in params]
            if held and vars(group).get("_partial_reduce_output") is not None:
                found.append(group._partial_reduce_output)
            for param in held:
                unsharded = vars(param).get("_unsharded_param")
                accumulated = vars(param).get("unsharded_accumulated_grad")
                if accumulated is not None:
                    found.append(accumulated)
                if unsharded is not None and unsharded.grad is not None:
                    found.append(unsharded.grad)
        return [local_part(grad) for grad in found]

    def clear_kept_gradients(self, params: set[int]) -> None:
        """Clear what :meth:`kept_gradients` returns."""
        for group in self._groups:
            for param in group.fsdp_params:
                if id(param.sharded_param) in params:
                    _clear_kept(group, param)


def _clear_kept(group: Any, param: Any) -> None:
    """Clear the gradient of ``param`` that waits for a reduction, wherever this torch keeps it."""
    if vars(group).get("_partial_reduce_output") is not None:
        group._partial_reduce_output = None
    if vars(param).get("unsharded_accumulated_grad") is not None:  # before torch 2.15
        param.unsharded_accumulated_grad = None
    unsharded = vars(param).get("_unsharded_param")
    if unsharded is not None:
        unsharded.grad = None


def _reduces_twice(group: Any) -> bool:
    """Whether parameters are sharded within hosts and replicated across them (``HSDP``)."""
    return type(group.mesh_info).__name__ == "HSDPMeshInfo"


def sharded_units(models: object) -> list[ShardedUnit]:
    """What ``fully_shard`` made of ``models`` (one, or a list) and of modules in them, each once, outermost first.

    The modules hold their shards afterwards, and not the whole parameters that a forward may have left.
    """
    found: list[ShardedUnit] = []
    if not any(name in sys.modules for name in _HOMES):
        return found
    given = models if isinstance(models, (list, tuple)) else [models]
    for model in given:
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            if is_fully_sharded(module):
                unit = ShardedUnit(module)
                if not any(unit.same_as(known) for known in found):
                    unit.reshard()
                    found.append(unit)
    return found


def has_shards(models: Iterable[torch.nn.Module]) -> bool:
    """Whether any parameter of ``models`` is a ``DTensor``, of ``fully_shard`` or of tensor parallelism."""
    held = (param for model in models for module in model.modules() for param in module._parameters.values())
    return any(type(param).__name__ == "DTensor" for param in held)


# -- shards ------------------------------------------------------------------------------------------------------------
def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a ``DTensor``, which shares its memory; any other tensor is returned itself."""
    if type(tensor).__name__ != "DTensor":  # steps ask this of every gradient
        return tensor  # type: ignore[no-any-return] # a tensor
    local: torch.Tensor = tensor.to_local()
    return local


def meshes_of(tensors: Iterable[Any]) -> list[Any]:
    """The device meshes that ``tensors`` are distributed over, each once."""
    found: list[Any] = []
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor" and tensor.device_mesh not in found:
            found.append(tensor.device_mesh)
    return found


def any_on_meshes(flag: torch.Tensor, meshes: Sequence[Any]) -> torch.Tensor:
    """Whether ``flag`` (0-dim float32) is set on any rank of ``meshes``; every one of these ranks must ask."""
    for mesh in meshes:
        # Shards may lie in host memory whose mesh communicates by NCCL alone.
        shared = flag.detach().to(mesh.device_type, copy=True)
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dimension))
        flag = shared
    return flag
