"""One op that is about to run: what it reads, and what it would give in float32."""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

from ampcompat.tools.core import HALF_DTYPES, Args, Kwargs, map_tree, tensors_in
from ampcompat.tools.tensors import readable

#: Ops that change the dtype.
CAST_OPS = ("_to_copy", "copy_")
_COLLECTIVES = ("c10d", "_c10d_functional")
#: Types of arguments that an op computes with; a number that a script multiplies by comes as a tensor.
_NUMBERS = ("number", "Optional[number]", "float", "Optional[float]", "Tensor")
#: What a batch norm that trains writes and does not read; the schema does not say so.
_STATISTICS = ("running_mean", "running_var")


class Call:
    """An op and its arguments, as they are before it runs."""

    def __init__(self, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.name = str(func.overloadpacket.__name__)
        self._before = {id(one): one.detach().clone() for one in self._overwritten}

    @functools.cached_property
    def by_name(self) -> dict[str, object]:
        """Its arguments by the names of its schema."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def writes_number(self) -> bool:
        """Whether it makes a tensor of one number that the script has written, as ``torch.tensor(-1e9)`` does."""
        value = self.by_name.get("self")
        return self.name == "lift_fresh" and isinstance(value, torch.Tensor) and value.numel() == 1

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that it reads, as far as they can be looked at."""
        if self.writes_number:
            return []
        unread: set[int] = set()
        trains = self.by_name.get("training", self.by_name.get("train", "with_update" in self.name))
        if "batch_norm" in self.name and trains:
            unread = {id(self.by_name.get(statistic)) for statistic in _STATISTICS}
        return [one for one in tensors_in((self.args, self.kwargs)) if readable(one) and id(one) not in unread]

    @property
    def is_collective(self) -> bool:
        """Whether it brings values of other ranks."""
        return self.func.namespace in _COLLECTIVES

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that it computes with, by name; not an index or a count."""
        if self.writes_number:
            return {"value": float(self.args[0])}  # type: ignore[arg-type]
        found = {}
        for argument in self.func._schema.arguments:
            value = self.by_name.get(argument.name)
            if isinstance(value, (int, float)) and str(argument.type) in _NUMBERS:
                found[argument.name] = float(value)
        return found

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input as it was before the op ran."""
        return self._before.get(id(tensor), tensor)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of the argument that ``tensor`` is."""
        return next((name for name, value in self.by_name.items() if value is tensor), "a tensor")

    def in_float32(self) -> list[torch.Tensor]:
        """Its results in float32 of the same inputs, after it ran; none where that cannot be, or draws numbers."""
        if self.is_collective or torch.Tag.nondeterministic_seeded in self.func.tags:
            return []
        kwargs = {name: torch.float32 if value in HALF_DTYPES else value for name, value in self.kwargs.items()}
        try:
            args = map_tree(self.args, self._widened, objects=False)
            return tensors_in(self.func(*args, **map_tree(kwargs, self._widened, objects=False)))
        except Exception:  # not every op takes float32 in place of half
            return []

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input as it was, in float32; a copy where the op writes it."""
        value = self.before(tensor)
        if value.dtype in HALF_DTYPES:
            return value.float()
        is_statistic = any(tensor is self.by_name.get(statistic) for statistic in _STATISTICS)
        return value.clone() if is_statistic or id(tensor) in self._before else value

    @property
    def _overwritten(self) -> list[torch.Tensor]:
        """What it writes in place, and may read before."""
        names = [
            one.name for one in self.func._schema.arguments if one.alias_info is not None and one.alias_info.is_write
        ]
        values = [self.by_name.get(name) for name in names if name not in _STATISTICS]
        return [value for value in values if isinstance(value, torch.Tensor) and readable(value)]
