"""Count the ops that run, by dtype and pass."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import is_grad_enabled
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat.tools.core import Args, Kwargs, tensors_in
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.frames import script_line
from ampcompat.tools.tensors import readable


class Op(NamedTuple):
    """What is counted apart.

    Attributes:
        name: As in "mm"; a cast is "cast from float32".
        direction: "forward", "backward", or "no grad" (optimizers, evaluation).
        dtype: Of its result.
    """

    name: str
    direction: str
    dtype: str


class OpTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts every op below autocast, where its dtype is what the device sees.

    Attributes:
        counts: How often each op ran.
        flops: Of matrix products, convolutions and attention.
        float32: How often such a product ran in float32, and its FLOPs, by its name and the script's line.
        devices: Types of the devices that they ran on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = False
        self._counts = True
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.counts: Counter[Op] = Counter()
        self.flops: Counter[Op] = Counter()
        self.float32: dict[tuple[str, str], tuple[int, int]] = {}
        self.devices: set[str] = set()

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
        self.__enter__()  # type: ignore[no-untyped-call]
        self.running = True

    def stop(self) -> None:
        """Stop counting, unless a mode that was entered inside of this one is still in force."""
        if self.running and _torch.innermost_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.running = False

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
        if not inputs or not outputs:  # made from nothing, as weights and noise are; or no float result
            return
        name = func.overloadpacket.__name__
        dtype = dtype_name(outputs[0].dtype)
        source = dtype_name(inputs[-1].dtype)
        if name in ("_to_copy", "copy_", "_foreach_copy_"):
            if source == dtype:
                return
            name = f"cast from {source}"
        op = Op(name, _direction(), dtype)
        self.counts[op] += 1
        self.devices.add(outputs[0].device.type)
        formula = _torch.flop_formula(func)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self.flops[op] += flops
            if dtype == "float32" and op.direction != "backward":  # which has no line of the script's, mostly
                self._note_float32(name, flops)

    def _note_float32(self, name: str, flops: int) -> None:
        line = script_line(sys._getframe())
        if line is not None:
            count, before = self.float32.get((name, str(line)), (0, 0))
            self.float32[name, str(line)] = count + 1, before + flops


def _direction() -> str:
    """The pass that runs now."""
    if _torch.current_node() is not None:
        return "backward"
    return "forward" if is_grad_enabled() else "no grad"
