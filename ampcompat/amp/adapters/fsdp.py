"""Models that ``fully_shard`` (FSDP2) has sharded before ``initialize``, at levels that cast weights.

FSDP2 keeps every parameter as float32 shards, which the optimizer steps, and gathers them in another dtype for forward
and backward. The shards *are* float32 masters. So amp makes none of its own: it tells each unit of ``fully_shard`` to
gather in half, and casts buffers, inputs and outputs as for any other model. ``model.parameters()`` is float32.

Each rank finds the overflows of its own shards alone, so that the ranks tell each other before any of them decides.
apex had no support for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ampcompat import _torch
from ampcompat._state import Part, state
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.half.casting import target_dtype
from ampcompat.amp.scaling.adapter import Adapter, use

_LINES = (
    "policy = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32); fully_shard(model,"
    " mp_policy=policy); amp.initialize(model, optimizer, opt_level='O0', cast_model_type=False, loss_scale={scale!r})"
)


@dataclass(eq=False)
class ShardIndex(Part):
    """Models that ``fully_shard`` has sharded.

    Attributes:
        modules: Modules in models under amp that ``fully_shard`` was called on.
    """

    modules: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)


shard_index = state.add(ShardIndex())


class Change(NamedTuple):
    """What one unit of ``fully_shard`` computes by, from this session on."""

    unit: _torch.ShardedUnit
    policy: Any


def plan(
    units: list[_torch.ShardedUnit],
    models: Sequence[torch.nn.Module],
    options: Mapping[str, Any],
    kept: Sequence[torch.nn.Module] = (),
) -> list[Change]:
    """Decide what each of ``units`` computes by; raise a RuntimeError where the level is not available.

    Args:
        units: What ``fully_shard`` made of ``models``.
        models: The models of a session.
        options: Its options; without a half ``cast_model_type`` units compute as ``fully_shard`` was told to.
        kept: The modules that ``keep_fp32`` names.
    """
    half = options["cast_model_type"]
    if half not in HALF_DTYPES:
        return [Change(unit, unit.given_policy) for unit in units]
    _refuse_other_shards(units, models, options["opt_level"])
    if not all(unit.can_change_policy for unit in units):
        lines = _LINES.format(dtype=half, scale=options["loss_scale"])
        raise RuntimeError(
            f"amp.initialize got a model sharded by fully_shard at opt_level={options['opt_level']!r} on torch"
            f" {torch.__version__} - amp cannot change the precision that this torch's fully_shard computes in - give"
            f" it to fully_shard, and have amp scale the loss alone: {lines}."
        )
    wide = {part for module in kept for part in module.modules()}
    norms = bool(options["keep_batchnorm_fp32"])
    return [Change(unit, _policy(unit, half, wide, norms, options["opt_level"])) for unit in units]


def _policy(
    unit: _torch.ShardedUnit, half: torch.dtype, wide: Collection[torch.nn.Module], norms: bool, level: str
) -> Any:
    """Return the policy by which ``unit`` computes in ``half``, or in float32 where all of its modules stay so."""
    chosen = unit.given_policy.param_dtype
    if chosen == torch.float32:  # by the script
        return unit.given_policy
    holders = [module for module, _ in unit.holders()]
    dtypes = {target_dtype(module, half, wide, norms) for module in holders}
    if len(dtypes) > 1:
        kept = next(module for module in holders if target_dtype(module, half, wide, norms) == torch.float32)
        name = type(kept).__name__
        raise RuntimeError(
            f"amp.initialize got a {type(unit.module).__name__} sharded by fully_shard at opt_level={level!r} in which"
            f" a {name} stays float32 - parameters that are gathered together have one dtype - shard it by itself, and"
            f" before the module around it: `for module in model.modules(): if isinstance(module, {name}):"
            " fully_shard(module)`, or pass keep_batchnorm_fp32=False."
        )
    if dtypes == {torch.float32}:
        return unit.policy_for(None)
    if chosen not in (None, half):
        raise RuntimeError(
            f"amp.initialize got a model that fully_shard computes in {chosen}, at opt_level={level!r}, which computes"
            f" in {half} - one of them must give way - leave param_dtype out of MixedPrecisionPolicy, or use"
            f" opt_level={'O5' if chosen == torch.bfloat16 else 'O2'!r}."
        )
    return unit.policy_for(half)


def _refuse_other_shards(units: list[_torch.ShardedUnit], models: Sequence[torch.nn.Module], level: str) -> None:
    """Raise a RuntimeError for a ``DTensor`` that ``fully_shard`` does not hold (of tensor parallelism)."""
    held = {id(shard) for unit in units for shard in unit.shards()}
    for model in models:
        for name, param in model.named_parameters():
            if type(param) is torch.nn.Parameter or id(param) in held or not _torch.is_sharded(param):
                continue
            raise RuntimeError(
                f"amp.initialize got a model with unsupported weights: {name!r} is a DTensor that fully_shard does not"
                f" hold, at opt_level={level!r} - amp keeps no float32 masters of shards, FSDP2 does - call fully_shard"
                " on the model, or use opt_level='O1' (O4 for bfloat16)."
            )


def apply(changes: list[Change]) -> None:
    """Make ``changes``."""
    for unit, policy in changes:
        unit.set_policy(policy)
        for module, name in unit.holders():
            known: frozenset[str] = module.__dict__.get("_amp_sharded", frozenset())
            object.__setattr__(module, "_amp_sharded", known | {name})
        shard_index.modules.add(unit.module)
    use(_Fsdp)


# -- gradients ---------------------------------------------------------------------------------------------------------
class _Fsdp(Adapter):
    """``fully_shard``: its units keep gradients that are not reduced yet, and each rank sees its own shards alone."""

    def defers_reduction(self, leaves: Sequence[torch.Tensor]) -> bool:
        ids = set(map(id, leaves))
        return any(unit.holds_back(ids) for unit in _units())

    def kept_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ids = set(map(id, leaves))
        return [grad for unit in _units() for grad in unit.kept_gradients(ids)]

    def clear_kept_gradients(self, leaves: Sequence[torch.Tensor]) -> None:
        ids = set(map(id, leaves))
        for unit in _units():
            unit.clear_kept_gradients(ids)

    def combined_flag(self, flag: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        meshes = _torch.meshes_of(tensors)
        if not meshes:
            return flag
        if flag is None:  # this rank had no gradient
            flag = torch.zeros((), dtype=torch.float32, device=meshes[0].device_type)
        return _torch.any_on_meshes(flag, meshes)


def _units() -> list[_torch.ShardedUnit]:
    return [_torch.ShardedUnit(module) for module in shard_index.modules]
