"""The API of before 2019: the handle that ``amp.init`` returns, and optimizers that scale their own losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ampcompat.amp import optimizer as _optimizer
from ampcompat.amp.autocast import disable_casts
from ampcompat.amp.block import scale_loss
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


class _Wrapper:
    """An optimizer whose attributes show through."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)


class PlainOptimWrapper(_Wrapper):
    """An optimizer with a ``scale_loss`` that does nothing, of ``NoOpHandle.wrap_optimizer``."""

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Yield ``loss`` as it is."""
        return nullcontext(loss)


class OptimWrapper(_Wrapper):
    """An optimizer that picks its scalers itself: of ``num_loss``, the n-th block of a step gets the n-th.

    As in apex (``apex/amp/opt.py: OptimWrapper``).
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        super().__init__(optimizer)
        self._num_loss, self._next = num_loss, 0
        amp_handle._adopt(optimizer, num_loss)

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Open a ``scale_loss`` block for this optimizer.

        Raises:
            RuntimeError: More blocks since the last step than ``num_loss``.
        """
        if self._next >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._next + 1} times before a step - wrap_optimizer(num_loss="
                f"{self._num_loss}) said how many losses there are - pass a larger num_loss."
            )
        self._next += 1
        return scale_loss(loss, self._optimizer, loss_id=self._next - 1)

    def step(self, closure: object = None) -> object:
        """Step the optimizer, unless a gradient overflowed."""
        self._next = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)


class AmpHandle:
    """Serve as ``amp._amp_state.handle`` while functions are cast (``apex/amp/handle.py: AmpHandle``)."""

    def __init__(self, owner: Session, verbose: bool = False) -> None:
        self._session, self.verbose = owner, verbose  # no cast is logged

    def is_active(self) -> bool:
        """Whether this call's casts are in force."""
        return self._session.policy.casts.enabled

    _is_active = property(is_active)

    @property
    def _default_scaler(self) -> LossScaler:
        return self._session.scalers[0]

    def has_cache(self) -> bool:
        """Whether there may be cached casts of weights."""
        return self.is_active() and torch.is_autocast_cache_enabled()

    def remove_cache(self, param: object) -> None:
        """Drop cached casts; autocast can only drop all of them."""
        torch.clear_autocast_cache()

    _clear_cache = staticmethod(torch.clear_autocast_cache)
    _disable_casts = staticmethod(disable_casts)

    def _deactivate(self) -> None:
        self._session.end_casts()

    def _adopt(self, optimizer: Any, num_loss: int = 1) -> None:
        """Put under amp an optimizer that no ``initialize`` was given."""
        scalers = self._session.scalers
        while len(scalers) < num_loss:
            scalers.append(LossScaler(self._session.properties.loss_scale, loss_id=len(scalers)))
        if "_amp_stash" not in vars(optimizer):
            _optimizer.attach(optimizer, self._session)

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> AbstractContextManager[torch.Tensor]:
        """Open a ``scale_loss`` block; ``optimizer`` need not be known yet."""
        self._adopt(optimizer)
        return scale_loss(loss, optimizer)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` so that it scales its own losses, ``num_loss`` of them per step."""
        return OptimWrapper(optimizer, self, num_loss)


class NoOpHandle:
    """Serve as ``amp._amp_state.handle`` where no function is cast (``apex/amp/handle.py: NoOpHandle``)."""

    verbose = False
    _is_active = False
    _disable_casts = staticmethod(disable_casts)

    def is_active(self) -> bool:
        """Return False."""
        return False

    def has_cache(self) -> bool:
        """Return False."""
        return False

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass

    def scale_loss(self, loss: torch.Tensor, optimizer: Any | None = None) -> AbstractContextManager[torch.Tensor]:
        """Yield ``loss`` as it is."""
        return nullcontext(loss)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> PlainOptimWrapper:
        """Give ``optimizer`` a ``scale_loss`` that does nothing."""
        return PlainOptimWrapper(optimizer)
