"""Counting the ops that run: dtype, FLOPs, casts, by module and direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.amp_model import Args, Kwargs
from ampcompat.amp.keep_fp32 import BorderPolicy
from ampcompat.amp.trees import tensors_in
from ampcompat.tools.dtypes import dtype_name, is_half
from ampcompat.tools.explain.tensors import readable
from ampcompat.tools.report.reasons import OUTSIDE, Called, why_not_half
from ampcompat.tools.running import RunningModules

#: Multiplications of these dimensions run on tensor cores without padding.
MULTIPLE = 8


class Product(NamedTuple):
    """A matrix product, convolution or attention: what FLOPs are counted of; and why it is not half, if it is not."""

    op: str
    module: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    reason: str = ""


class OpTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts every op below autocast.

    Attributes:
        ops: Number of ops by direction (forward, backward, or no grad: optimizers, evaluation) and dtype.
        flops: FLOPs of products by direction and dtype.
        module_flops: FLOPs of forward products by module and dtype.
        products: FLOPs of each forward product.
        calls: How often each product ran.
        casts: Number of casts, by dtypes.
        cast_bytes: Bytes read by casts, by dtypes.
        results: Bytes of forward results, by dtype, those of casts apart.
        cast_results: Bytes of what forward casts made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[tuple[str, str]] = Counter()
        self.flops: Counter[tuple[str, str]] = Counter()
        self.module_flops: Counter[tuple[str, str]] = Counter()
        self.products: Counter[Product] = Counter()
        self.calls: Counter[Product] = Counter()
        self.casts: Counter[tuple[str, str]] = Counter()
        self.cast_bytes: Counter[tuple[str, str]] = Counter()
        self.results: Counter[str] = Counter()
        self.cast_results = 0
        self.modules = RunningModules(self._called)
        self.names: dict[int, str] = {}
        self.running = False

    def forget(self) -> None:
        """Begin the counts anew."""
        for counts in vars(self).values():
            if isinstance(counts, Counter):
                counts.clear()
        self.cast_results = 0

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
        own_policy = module.__dict__.get("_amp_policy")
        at_border = isinstance(own_policy, BorderPolicy)
        policy = around.policy
        if own_policy is not None and not at_border:
            policy = own_policy
        return Called(self._name_of(module), policy, kept=around.kept or at_border)

    def _name_of(self, module: torch.nn.Module) -> str:
        if id(module) not in self.names:
            self._learn_names(module)
        return self.names[id(module)]

    def _learn_names(self, outermost: torch.nn.Module) -> None:
        """Name the modules of all initialized models, and those of ``outermost``, which may be in none of them."""
        models = list(state.models.live)
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
        if not func.is_view:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: OpOverload, args: Args, kwargs: Kwargs, result: object) -> None:
        outputs = [t for t in tensors_in(result) if readable(t)]
        inputs = [t for t in tensors_in((args, kwargs)) if readable(t)]
        name = func.overloadpacket.__name__
        direction = _direction()
        if name == "_foreach_copy_":  # masters and their gradients
            for target, source in zip(tensors_in(args[0]), tensors_in(args[1]), strict=True):
                self._count_cast(source, target, direction)
            return
        if not inputs or not outputs:  # made from nothing, as weights and noise are; or no float result
            return
        if name in ("_to_copy", "copy_"):
            self._count_cast(inputs[-1], outputs[0], direction)
            return
        formula = _torch.flop_formula(func)
        if formula is not None:
            self._count_product(func, formula, args, kwargs, result, inputs, direction)
        self.ops[direction, dtype_name(outputs[0].dtype)] += 1
        if direction == "forward":
            new = [out for out in outputs if not any(out is one for one in inputs)]  # what is in place takes no memory
            for out in new:
                self.results[dtype_name(out.dtype)] += out.numel() * out.element_size()

    def _count_cast(self, source: torch.Tensor, target: torch.Tensor, direction: str) -> None:
        if source.dtype == target.dtype:
            return
        pair = dtype_name(source.dtype), dtype_name(target.dtype)
        self.casts[pair] += 1
        self.cast_bytes[pair] += source.numel() * source.element_size()
        if direction == "forward":
            self.cast_results += target.numel() * target.element_size()

    def _count_product(
        self,
        func: OpOverload,
        formula: Callable[..., int],
        args: Args,
        kwargs: Kwargs,
        result: object,
        inputs: list[torch.Tensor],
        direction: str,
    ) -> None:
        dtype = dtype_name(inputs[0].dtype)
        flops = formula(*args, **kwargs, out_val=result)
        self.flops[direction, dtype] += flops
        if direction != "backward":
            called = self.modules.innermost or OUTSIDE
            shapes = tuple(tuple(t.shape) for t in inputs if t.dim() > 1)
            reason = ""
            if not is_half(dtype):
                reason = why_not_half(func, called, inputs[0].dtype, inputs[0].device.type)
            product = Product(func.overloadpacket.__name__, called.name, dtype, shapes, reason)
            self.products[product] += flops
            self.calls[product] += 1
            self.module_flops[called.name, dtype] += flops


def _direction() -> str:
    """The pass that runs now."""
    if _torch.current_node() is not None:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "no grad"


def odd_dimensions(product: Product) -> list[int]:
    """Dimensions of a half product that are no multiple of 8: those of the matrices, or the channels."""
    if "conv" in product.op:
        found = {size for shape in product.shapes[1:2] for size in shape[:2]}
    else:
        found = {size for shape in product.shapes for size in shape[-2:]}
    return sorted(size for size in found if size % MULTIPLE)
