"""``FP16_Optimizer`` as ``apex.optimizers`` and ``apex.contrib.optimizers`` had it."""

from __future__ import annotations

from ampcompat import fp16_utils


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """:class:`ampcompat.fp16_utils.FP16_Optimizer` whose dynamic scale begins at 2^16, not at 2^32."""

    first_scale = 2.0**16

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = value
