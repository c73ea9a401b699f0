"""``FP16_Optimizer`` as ``apex.optimizers`` and ``apex.contrib.optimizers`` had it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ampcompat import fp16_utils


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """:class:`ampcompat.fp16_utils.FP16_Optimizer` whose dynamic scale begins at 2^16, not at 2^32.

    Args:
        init_optimizer: Optimizer over half and float32 parameters, of any device.
        static_loss_scale: Fixed loss scale.
        dynamic_loss_scale: Let the scale move instead.
        dynamic_loss_args: Keyword arguments of :class:`ampcompat.fp16_utils.DynamicLossScaler`.
        verbose: Say what happens, on rank 0.

    Raises:
        TypeError: ``init_optimizer`` is no optimizer, or a parameter is neither half nor float32.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        scaling = {"init_scale": 2.0**16, **(dynamic_loss_args or {})}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, scaling, verbose)

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = value
