"""``FP16_Optimizer`` as ``apex.optimizers`` and ``apex.contrib.optimizers`` had it."""

from __future__ import annotations

from typing import Any

from ampcompat import fp16_utils
from ampcompat.fp16_utils.loss_scaler import AnyLossScaler, DynamicLossScaler, LossScaler


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """:class:`ampcompat.fp16_utils.FP16_Optimizer` with the scaler of before 2019, beginning at 2^16."""

    def _make_scaler(self, static_scale: float, is_dynamic: bool, arguments: dict[str, Any]) -> AnyLossScaler:
        if is_dynamic:
            return DynamicLossScaler(**{"init_scale": 2.0**16, **arguments})
        return LossScaler(static_scale)

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = value
