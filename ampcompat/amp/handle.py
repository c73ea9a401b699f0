"""The handle objects of apex, and ``disable_casts``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ampcompat.amp import optimizer as _optimizer
from ampcompat.amp.autocast import disable_casts
from ampcompat.amp.block import scale_loss
from ampcompat.amp.opt import OptimWrapper, PlainOptimWrapper
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


class AmpHandle:
    """What ``amp._amp_state.handle`` is while functions are cast."""

    def __init__(self, owner: Session, verbose: bool = False) -> None:
        self._session, self._verbose = owner, verbose

    def is_active(self) -> bool:
        """Whether this call's casts are in force."""
        return self._session.policy.casts.enabled

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @property
    def _default_scaler(self) -> LossScaler:
        return self._session.scalers[0]

    @property
    def verbose(self) -> bool:
        """Whether casts are logged; apex's word, of no effect here."""
        return self._verbose

    def has_cache(self) -> bool:
        """Whether there may be cached casts of weights."""
        return self.is_active() and torch.is_autocast_cache_enabled()

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def remove_cache(self, param: Any) -> None:
        """Drop cached casts; autocast can only drop all of them."""
        torch.clear_autocast_cache()

    def _disable_casts(self) -> AbstractContextManager[Any]:
        return disable_casts()

    def _deactivate(self) -> None:
        """End this call's casts for good; the last active call takes every patch off torch."""
        self._session.end_casts()

    def _adopt(self, optimizer: Any, num_loss: int = 1) -> None:
        """Take an optimizer that no ``initialize`` was given."""
        while len(self._session.scalers) < num_loss:
            loss_id = len(self._session.scalers)
            self._session.scalers.append(LossScaler(self._session.properties.loss_scale, loss_id=loss_id))
        if "_amp_stash" not in vars(optimizer):
            _optimizer.attach(optimizer, self._session)

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> AbstractContextManager[torch.Tensor]:
        """The way to scale a loss before 2019: ``optimizer`` need not be known yet."""
        self._adopt(optimizer)
        return scale_loss(loss, optimizer)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with a ``scale_loss(loss)`` of its own, for ``num_loss`` losses per step."""
        return OptimWrapper(optimizer, self, num_loss)


class NoOpHandle:
    """What ``amp._amp_state.handle`` is where no function is cast."""

    verbose = False
    _is_active = False

    def is_active(self) -> bool:
        """Always False."""
        return False

    def has_cache(self) -> bool:
        """Always False."""
        return False

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass

    def _disable_casts(self) -> AbstractContextManager[Any]:
        return disable_casts()

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any = None) -> Iterator[torch.Tensor]:
        """Yields ``loss`` as it is."""
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> PlainOptimWrapper:
        """``optimizer`` with a ``scale_loss`` that does nothing."""
        return PlainOptimWrapper(optimizer)
