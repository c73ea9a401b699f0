"""One op that ran, and what it was given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from ampcompat.tools.core import HALF_DTYPES, Args, Kwargs, map_tree, tensors_in
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.tensors import readable

#: Ops that change the dtype.
CAST_OPS = ("_to_copy", "copy_")
#: Functions that casts of functions give half, whatever they get.
HALF_FUNCTIONS = ("matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "conv1d", "conv2d", "conv3d", "linear")
_COLLECTIVES = ("c10d", "_c10d_functional")
#: Ops that divide by a tensor, without the "_" of those that write in place; a power does if its exponent is below 0.
DIVISIONS = ("div", "reciprocal", "rsqrt", "pow")
#: Names of arguments that say more than "self" and "other" do.
_TELLING = ("weight", "bias", "target", "mask", "attn_mask", "pos_weight", "running_mean", "running_var")
#: What a batch norm that trains writes, and does not read.
_STATISTICS = ("running_mean", "running_var")


@dataclass
class Call:
    """An op that is about to run, or ran."""

    func: OpOverload
    args: Args
    kwargs: Kwargs
    #: By id, float32 copies of the half tensors that it writes in place, as they were before.
    before: dict[int, torch.Tensor] = field(init=False)
    _was_computed: bool = field(init=False, default=False)
    _wide: object = field(init=False, default=None)  # what it gives in float32

    def __post_init__(self) -> None:
        half = (tensor for tensor in self._overwritten if tensor.dtype in HALF_DTYPES)
        self.before = {id(tensor): tensor.float() for tensor in half}

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

    @property
    def denominator(self) -> torch.Tensor | None:
        """The tensor that it divides by; None where there is none."""
        name = self.name.removesuffix("_")
        is_power = name == "pow" and not _has_negative(self.by_name.get("exponent"))
        if name not in DIVISIONS or is_power:
            return None
        value = self.by_name.get("other", self.by_name.get("self"))
        return value if isinstance(value, torch.Tensor) else None

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
            unread = {id(self.by_name.get(statistic)) for statistic in _STATISTICS}
        return [t for t in tensors_in((self.args, self.kwargs)) if readable(t) and id(t) not in unread]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of the argument that ``tensor`` is; "" where it is in a list."""
        return next((name for name, value in self.by_name.items() if value is tensor), "")

    def describe(self, tensor: torch.Tensor, function: str) -> str:
        """Describe an argument, as in "weight given to cross_entropy (float32 of shape (3,))"."""
        name = self.name_of(tensor)
        shown = name if name in _TELLING else "a tensor"
        return f"{shown} given to {function or self.name} ({dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)})"

    def in_float32(self, twin_of: Callable[[torch.Tensor], torch.Tensor | None]) -> object:
        """Compute it, after it ran, in float32, once; the run stays bitwise what it was.

        Args:
            twin_of: Gives what to take, and to write, in place of an input, or None.

        Returns:
            The result; None where that cannot be computed.
        """
        if not self._was_computed:
            self._was_computed = True
            self._wide = self._compute_in_float32(twin_of)
        return self._wide

    def _compute_in_float32(self, twin_of: Callable[[torch.Tensor], torch.Tensor | None]) -> object:
        if self.is_collective:
            return None

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            twin = twin_of(tensor)
            if twin is not None:
                return twin
            if id(tensor) in self.before:
                return self.before[id(tensor)]
            if tensor.dtype in HALF_DTYPES:
                return tensor.float()
            return tensor.clone() if id(tensor) in self._written else tensor

        if any(id(tensor) not in self.before and twin_of(tensor) is None for tensor in self._overwritten):
            return None
        try:
            args = map_tree(self.args, widen, objects=False)
            kwargs = {k: torch.float32 if v in HALF_DTYPES else v for k, v in self.kwargs.items()}
            with self._random_numbers_kept():
                return self.func(*args, **map_tree(kwargs, widen, objects=False))
        except Exception:  # not every op takes float32 in place of half
            return None

    @functools.cached_property
    def _overwritten(self) -> list[torch.Tensor]:
        """What it wrote in place, and may have read before."""
        arguments = self.func._schema.arguments
        names = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        values = [self.by_name.get(name) for name in names if name not in _STATISTICS]
        return [value for value in values if isinstance(value, torch.Tensor) and readable(value)]

    @functools.cached_property
    def _written(self) -> set[int]:
        """The ids of what it wrote: the schema of a batch norm does not say that it writes its running statistics."""
        return {id(value) for value in (*self._overwritten, *map(self.by_name.get, _STATISTICS))}

    def _random_numbers_kept(self) -> contextlib.AbstractContextManager[None]:
        if torch.Tag.nondeterministic_seeded not in self.func.tags:
            return contextlib.nullcontext()
        devices = {tensor.device for tensor in self.inputs if tensor.device.type == "cuda"}
        return torch.random.fork_rng(devices=list(devices))


def _has_negative(exponent: object) -> bool:
    if isinstance(exponent, torch.Tensor):
        return bool(exponent.lt(0).any())
    return isinstance(exponent, (int, float)) and exponent < 0
