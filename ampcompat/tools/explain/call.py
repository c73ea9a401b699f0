"""One op that ran, and what it was given."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from ampcompat.tools.core import HALF_DTYPES, Args, Kwargs, map_tree, tensors_in
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.tensors import largest, readable

#: Ops that change the dtype.
CAST_OPS = ("_to_copy", "copy_", "to")
_COLLECTIVES = ("c10d", "_c10d_functional")
#: Names of arguments that say more than "self" and "other" do.
_TELLING = ("weight", "bias", "target", "mask", "attn_mask", "pos_weight", "running_mean", "running_var")


@dataclass
class Call:
    """An op that is about to run, or ran."""

    func: OpOverload
    args: Args
    kwargs: Kwargs
    #: By id, float32 copies of the half tensors that it writes in place, as they were before.
    before: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument in self.func._schema.arguments:
            value = self.by_name.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES and readable(value):
                self.before[id(value)] = value.float()

    @property
    def name(self) -> str:
        """As in "mm"."""
        return str(self.func.overloadpacket.__name__)

    @property
    def is_collective(self) -> bool:
        """Whether it brings values of other ranks."""
        return self.func.namespace in _COLLECTIVES

    @property
    def numbers(self) -> list[float]:
        """The numbers among its arguments."""
        given = (*self.args, *self.kwargs.values())
        return [float(one) for one in given if isinstance(one, (int, float)) and not isinstance(one, bool)]

    @functools.cached_property
    def by_name(self) -> dict[str, object]:
        """Its arguments by the names of its schema."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that it read, as far as they can be looked at.

        A batch norm that trains reads no running statistics, though it is given them.
        """
        unread: set[int] = set()
        trains = self.by_name.get("training", self.by_name.get("train", "with_update" in self.name))
        if "batch_norm" in self.name and trains:
            unread = {id(self.by_name.get(statistic)) for statistic in ("running_mean", "running_var")}
        return [t for t in tensors_in((self.args, self.kwargs)) if readable(t) and id(t) not in unread]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of the argument that ``tensor`` is; "" where it is in a list."""
        return next((name for name, value in self.by_name.items() if value is tensor), "")

    def describe(self, tensor: torch.Tensor, function: str) -> str:
        """Describe an argument, as in "weight given to cross_entropy (float32 of shape (3,))"."""
        name = self.name_of(tensor)
        shown = name if name in _TELLING else "a tensor"
        return f"{shown} given to {function or self.name} ({dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)})"

    def largest_in_float32(self, out: torch.Tensor) -> float | None:
        """The largest magnitude of the same op in float32, from the same inputs; of its input for a cast.

        Returns:
            That of ``out`` where it is no half tensor; None where the op does not take float32.
        """
        if out.dtype not in HALF_DTYPES:
            return largest(out)
        if self.name in CAST_OPS and self.inputs:
            return largest(self.inputs[-1])
        if id(out) not in self.before and any(tensor is out for tensor in self.inputs):
            return None  # what it held before is gone

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self.before:
                return self.before[id(tensor)]
            return tensor.float() if tensor.dtype in HALF_DTYPES else tensor

        try:
            args = map_tree(self.args, widen, objects=False)
            kwargs = {k: torch.float32 if v in HALF_DTYPES else v for k, v in self.kwargs.items()}
            result = self.func(*args, **map_tree(kwargs, widen, objects=False))
        except Exception:  # not every op takes float32 in place of half
            return None
        return max((largest(t) for t in tensors_in(result)), default=None)
