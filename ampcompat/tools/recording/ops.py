"""Count the ops that run: dtype, FLOPs, casts, by module and direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat.tools.core import Args, Kwargs, boundary_of, live_models, policy_of, tensors_in
from ampcompat.tools.dtypes import dtype_name, is_half
from ampcompat.tools.recording.modules import RunningModules
from ampcompat.tools.recording.reasons import OUTSIDE, Called, why_not_half
from ampcompat.tools.tensors import readable


class Product(NamedTuple):
    """A matrix product, convolution or attention: what FLOPs are counted of; and why it is not half, if it is not."""

    op: str
    module: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    reason: str = ""


@dataclass
class Tally:
    """Count the ops that ran. A direction is "forward", "backward", or "no grad" (optimizers, evaluation).

    Attributes:
        ops: Number of ops by direction and dtype.
        flops: FLOPs of products by direction and dtype.
        products: FLOPs of each product outside of the backward pass.
        casts: Number of casts, by dtypes.
        cast_bytes: Bytes read by casts, by dtypes.
        results: Bytes of forward results, by dtype, those of casts apart.
        cast_results: Bytes of what forward casts made, by dtype.
    """

    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    products: Counter[Product] = field(default_factory=Counter)
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    cast_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    cast_results: Counter[str] = field(default_factory=Counter)


class OpTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts every op below autocast, in its ``tally``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self.modules = RunningModules(self._called)
        self.names: dict[int, str] = {}
        self.running = False
        self._counts = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def start(self) -> None:
        """Count from here on."""
        self.modules.start()
        self.__enter__()  # type: ignore[no-untyped-call]
        self.running = True

    def stop(self) -> bool:
        """Stop counting, unless a mode that was entered inside of this one is still in force; says whether it did."""
        if self.running and _torch.innermost_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.modules.stop()
            self.running = False
        return not self.running

    def _called(self, module: torch.nn.Module, around: Called | None) -> Called:
        """Describe ``module``, whose forward begins inside of ``around``."""
        if around is None:
            around = OUTSIDE
        policy = policy_of(module) or around.policy
        return Called(self._name_of(module), policy, kept=around.kept or boundary_of(module))

    def _name_of(self, module: torch.nn.Module) -> str:
        if id(module) not in self.names:
            self._learn_names(module)
        return self.names[id(module)]

    def _learn_names(self, outermost: torch.nn.Module) -> None:
        """Name the modules of all initialized models, and those of ``outermost``, which may be in none of them."""
        models = live_models()
        for model in models:
            root = type(model).__name__ if len(models) > 1 else ""
            for name, inner in model.named_modules():
                self.names[id(inner)] = ".".join(filter(None, (root, name))) or type(model).__name__
        for name, inner in outermost.named_modules():
            self.names.setdefault(id(inner), ".".join(filter(None, (type(outermost).__name__, name))))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._counts and not func.is_view:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: OpOverload, args: Args, kwargs: Kwargs, result: object) -> None:
        outputs = [t for t in tensors_in(result) if readable(t)]
        inputs = [t for t in tensors_in((args, kwargs)) if readable(t)]
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_":  # masters and their gradients
            for target, source in zip(tensors_in(args[0]), tensors_in(args[1]), strict=True):
                self._count_cast(source, target)
            return
        if not inputs or not outputs:  # made from nothing, as weights and noise are; or no float result
            return
        if name in ("_to_copy", "copy_"):
            self._count_cast(inputs[-1], outputs[0])
            return
        formula = _torch.flop_formula(func)
        if formula is not None:
            self._count_product(func, inputs, flops=formula(*args, **kwargs, out_val=result))
        direction = _direction()
        self.tally.ops[direction, dtype_name(outputs[0].dtype)] += 1
        if direction == "forward":
            for out in outputs:
                if not any(out is one for one in inputs):  # what is in place takes no memory
                    self.tally.results[dtype_name(out.dtype)] += out.numel() * out.element_size()

    def _count_cast(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dtype == target.dtype:
            return
        pair = dtype_name(source.dtype), dtype_name(target.dtype)
        self.tally.casts[pair] += 1
        self.tally.cast_bytes[pair] += source.numel() * source.element_size()
        if _direction() == "forward":
            self.tally.cast_results[pair[1]] += target.numel() * target.element_size()

    def _count_product(self, func: OpOverload, inputs: list[torch.Tensor], flops: int) -> None:
        direction = _direction()
        dtype = dtype_name(inputs[0].dtype)
        self.tally.flops[direction, dtype] += flops
        if direction == "backward":
            return
        called = self.modules.innermost or OUTSIDE
        shapes = tuple(tuple(t.shape) for t in inputs if t.dim() > 1)[:2]
        reason = "" if is_half(dtype) else why_not_half(func, called, inputs[0].dtype, inputs[0].device.type)
        self.tally.products[Product(func.overloadpacket.__name__, called.name, dtype, shapes, reason)] += flops


def _direction() -> str:
    """The pass that runs now."""
    if _torch.current_node() is not None:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "no grad"
