"""Counting the ops that run: dtype, FLOPs, casts, by module and direction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.amp_model import Args, Kwargs
from ampcompat.amp.casts.trees import tensors_in
from ampcompat.amp.keep_fp32 import BoundaryPolicy
from ampcompat.tools.dtypes import dtype_name, is_half
from ampcompat.tools.explain.tensors import readable
from ampcompat.tools.report.reasons import OUTSIDE, Called, why_not_half
from ampcompat.tools.report.record import Product, Tally
from ampcompat.tools.running import RunningModules


class OpTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts every op below autocast, in its ``tally``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self.modules = RunningModules(self._called)
        self.names: dict[int, str] = {}
        self.running = False

    def forget(self) -> None:
        """Begin the counts anew."""
        self.tally = Tally()

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
        at_border = isinstance(own_policy, BoundaryPolicy)
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
        self.tally.ops[direction, dtype_name(outputs[0].dtype)] += 1
        if direction == "forward":
            new = [out for out in outputs if not any(out is one for one in inputs)]  # what is in place takes no memory
            for out in new:
                self.tally.results[dtype_name(out.dtype)] += out.numel() * out.element_size()

    def _count_cast(self, source: torch.Tensor, target: torch.Tensor, direction: str) -> None:
        if source.dtype == target.dtype:
            return
        pair = dtype_name(source.dtype), dtype_name(target.dtype)
        self.tally.casts[pair] += 1
        self.tally.cast_bytes[pair] += source.numel() * source.element_size()
        if direction == "forward":
            self.tally.cast_results[pair[1]] += target.numel() * target.element_size()

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
        self.tally.flops[direction, dtype] += flops
        if direction != "backward":
            called = self.modules.innermost or OUTSIDE
            shapes = tuple(tuple(t.shape) for t in inputs if t.dim() > 1)[:2]
            reason = ""
            if not is_half(dtype):
                reason = why_not_half(func, called, inputs[0].dtype, inputs[0].device.type)
            product = Product(func.overloadpacket.__name__, called.name, dtype, shapes, reason)
            self.tally.products[product] += flops


def _direction() -> str:
    """The pass that runs now."""
    if _torch.current_node() is not None:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "no grad"
