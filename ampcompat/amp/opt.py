"""``handle.wrap_optimizer``: an optimizer that scales its own losses, as before 2019."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ampcompat.amp.block import scale_loss

if TYPE_CHECKING:
    from ampcompat.amp.handle import AmpHandle


class OptimWrapper:
    """An optimizer whose ``scale_loss(loss)`` picks a scaler by itself: the n-th block of a step gets the n-th.

    Args:
        optimizer: Any torch optimizer; its attributes show through.
        amp_handle: What ``amp.init`` returned.
        num_loss: Losses per step.
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        self._optimizer, self._handle, self._num_loss = optimizer, amp_handle, num_loss
        self._next = 0
        amp_handle._adopt(optimizer, num_loss)

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """A ``scale_loss`` block for this optimizer.

        Raises:
            RuntimeError: More blocks since the last step than ``num_loss``.
        """
        if self._next >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._next + 1} times before a step - wrap_optimizer(num_loss="
                f"{self._num_loss}) said how many losses there are - pass a larger num_loss."
            )
        index, self._next = self._next, self._next + 1
        return scale_loss(loss, self._optimizer, loss_id=index)

    def step(self, closure: Any = None) -> Any:
        """The optimizer's step, skipped after an overflow."""
        self._next = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)


class PlainOptimWrapper:
    """What ``wrap_optimizer`` returns where amp is disabled: the optimizer, with a ``scale_loss`` that does nothing."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Yields ``loss`` as it is."""
        return nullcontext(loss)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
