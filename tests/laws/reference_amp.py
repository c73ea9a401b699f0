"""What DESIGN says of loss scaling and masters, in plain Python and float64: slow, and nothing of ampcompat in it.

The training problem is made so that the truth is known: ``loss = sum(c * p)`` over chosen coefficients, so the true
gradient of each parameter is its coefficient, and every coefficient is a small multiple of a power of two, exact in
half precision under any scale that does not overflow.
"""

import math
from dataclasses import dataclass, field

HALF_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
FLOOR = 2.0**-24


@dataclass
class Scaler:
    """One loss scale: x2 after ``window`` clean passes, /2 on overflow, clamped where it moves."""

    dynamic: bool
    scale: float
    minimum: float | None
    maximum: float
    window: int
    unskipped: int = 0

    @classmethod
    def make(cls, loss_scale, minimum, maximum, window):
        if loss_scale == "dynamic":
            return cls(True, min(maximum, 2.0**16), minimum, maximum, window)
        return cls(False, float(loss_scale), minimum, maximum, window)

    def update(self, overflow):
        if not self.dynamic:
            self.unskipped += 1
        elif overflow:
            smaller = self.scale / 2
            floor = FLOOR if self.minimum is None else self.minimum
            self.scale = max(floor, smaller) if smaller < self.scale else smaller
            self.unskipped = 0
        else:
            self.unskipped += 1
            if self.unskipped == self.window:
                self.scale, self.unskipped = min(self.maximum, self.scale * 2), 0


@dataclass
class Param:
    """One parameter: its exact value, the dtype its gradient travels in, and what has accumulated."""

    value: list[float]
    travels: str
    grad: list[float] | None = None
    momentum: list[float] | None = None


@dataclass
class Optimizer:
    """SGD with momentum, as torch defines it, in float64; ``pending``: an overflow was seen since the last step."""

    params: list[Param]
    lr: float
    momentum: float
    pending: bool = False
    skipped: bool = False
    history: list[bool] = field(default_factory=list)

    def block(self, scaler, coefficients, poison):
        """One ``scale_loss`` block. ``coefficients``: per param a list, or None for no gradient."""
        overflow = False
        for param, coefficient in zip(self.params, coefficients, strict=True):
            if coefficient is None:
                continue
            scaled = [c * scaler.scale for c in coefficient]
            overflow |= poison or any(abs(s) > HALF_MAX[param.travels] for s in scaled)
            old = param.grad or [0.0] * len(coefficient)
            param.grad = [a + b for a, b in zip(old, coefficient, strict=True)]
        return overflow

    def note(self, scaler, overflow):
        self.pending |= overflow and scaler.dynamic

    def step(self):
        self.skipped, self.pending = self.pending, False
        if not self.skipped:
            for param in self.params:
                if param.grad is None:
                    continue
                grad = param.grad
                if self.momentum:
                    if param.momentum is None:
                        param.momentum = list(grad)
                    else:
                        param.momentum = [self.momentum * m + g for m, g in zip(param.momentum, grad, strict=True)]
                    grad = param.momentum
                param.value = [v - self.lr * g for v, g in zip(param.value, grad, strict=True)]

    def zero_grad(self):
        for param in self.params:
            param.grad = None


def is_power_of_two(number):
    return number > 0 and math.frexp(number)[0] == 0.5
