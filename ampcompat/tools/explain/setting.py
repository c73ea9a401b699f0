"""What a fault and its hints depend on beside the event: the level, the loss scale, what is known of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from ampcompat.tools.core import LEVELS, LossScaler, kept_in_float32, latest_call
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.growth import Grown


@dataclass(frozen=True)
class Setting:
    """The setting in which something left the range."""

    half: str  # the half dtype in force, as in "float16"; "" where nothing is half
    casts_functions: bool  # so that ``.float()`` before them is undone
    scale: float  # the loss scale of the backward pass
    dynamic: bool  # whether an overflow brings it down
    origin: str  # where a parameter or buffer that is not finite may come from, in words; "" where that is not known
    growth: Grown | None  # the weight that the last steps made many times larger, if any
    kept: list[str]  # names of the modules that are kept in float32 already
    floor: float = 0.0  # what the script lets it come down to

    @property
    def comes_down(self) -> bool:
        """Whether the loss scale still comes down."""
        return self.dynamic and self.scale > self.floor

    @property
    def casts_weights(self) -> bool:
        """Whether weights are half, so that layers take half alone."""
        return bool(self.half) and not self.casts_functions

    @property
    def cast_to_half(self) -> str:
        """The method of a tensor, as a script calls it."""
        return ".bfloat16()" if self.half == "bfloat16" else ".half()"


def setting_of(scaler: LossScaler, scale: float, origin: str, growth: Grown | None) -> Setting:
    """The setting in force, at the ``scale`` that ``scaler`` had."""
    latest = latest_call()
    half = ""
    casts_functions = False
    if latest is not None and latest.half_dtype is not None:
        half = dtype_name(latest.half_dtype)
        casts_functions = LEVELS[latest.opt_level].patch_torch_functions
    return Setting(
        half=half,
        casts_functions=casts_functions,
        scale=scale,
        dynamic=scaler.dynamic,
        origin=origin,
        growth=growth,
        kept=kept_in_float32(),
        floor=scaler._min_loss_scale,
    )
