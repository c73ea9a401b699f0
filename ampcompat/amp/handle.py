"""The API of before 2019: the handle that ``amp.init`` returns, and optimizers that scale their own losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat.amp._amp_state import master_params
from ampcompat.amp._process_optimizer import AmpOptimizerState
from ampcompat.amp.adapters import wrapped
from ampcompat.amp.casts.contexts import are_switched_off, cast_state, disable_casts, switch_casts
from ampcompat.amp.scaling.optimizer import attach as _attach
from ampcompat.amp.scaling.scale_loss import scale_loss
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import DISABLED, Session
from ampcompat.amp.session_casts import end_casts

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "master_params", "scale_loss"]


@dataclass(eq=False)
class AmpHandle:
    """``amp._amp_state.handle`` while functions are cast (``apex/amp/handle.py: AmpHandle``)."""

    _session: Session = DISABLED

    def is_active(self) -> bool:
        """Whether the casts of the handle's session are in force."""
        return self._session.policy.casts.enabled and not are_switched_off()

    @property
    def _is_active(self) -> bool:
        """As :meth:`is_active`. Scripts set it to turn casts off for a while, in this thread, at whatever level."""
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        switch_casts(on=value)

    _clear_cache = staticmethod(torch.clear_autocast_cache)

    def _deactivate(self) -> None:
        end_casts(self._session)

    def _put_under_amp(self, optimizer: Any, num_loss: int) -> None:
        """Put under amp an optimizer that no ``initialize`` was given."""
        session = self._session
        if not session.enabled:
            return
        while len(session.scalers) < num_loss:
            session.scalers.append(LossScaler(session.properties.loss_scale, loss_id=len(session.scalers)))
        if "_amp_stash" not in vars(optimizer):
            wrapped.wrap(optimizer)
            _attach(optimizer, session, AmpOptimizerState)

    def _scale_loss(self, loss: torch.Tensor, optimizer: Any, loss_id: int) -> AbstractContextManager[torch.Tensor]:
        self._put_under_amp(optimizer, loss_id + 1)
        if not self._session.enabled:
            return nullcontext(loss)
        return scale_loss(loss, optimizer, loss_id)

    def scale_loss(self, loss: torch.Tensor, optimizer: Any = None) -> AbstractContextManager[torch.Tensor]:
        """Open a ``scale_loss`` block; ``optimizer`` need not be known yet."""
        return self._scale_loss(loss, optimizer, 0)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` so that it scales its own losses, ``num_loss`` of them per step."""
        return OptimWrapper(optimizer, self, num_loss)


class NoOpHandle(AmpHandle):
    """``amp._amp_state.handle`` of a session that casts no functions: losses stay as they are."""

    def is_active(self) -> bool:
        """Whether casts of an earlier session are in force outside of its models."""
        return cast_state.ambient is not None and not are_switched_off()


class OptimWrapper:
    """An optimizer that picks the scalers of its blocks: the n-th since its last step gets the n-th of ``num_loss``.

    Its other attributes are the optimizer's. As in apex (``apex/amp/opt.py: OptimWrapper``).
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._next = 0  # the loss id of the next block
        amp_handle._put_under_amp(optimizer, num_loss)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not yet there while a copy is made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # ``__getattr__`` would find these too, but not where a subclass calls ``super().state_dict()``.
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        saved: dict[str, Any] = self._optimizer.state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer."""
        self._optimizer.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, as the optimizer does."""
        self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self._optimizer.add_param_group(param_group)

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Open a ``scale_loss`` block for this optimizer; RuntimeError after more than ``num_loss`` since the step."""
        if self._next >= self._num_loss and self._amp_handle._session.enabled:
            raise RuntimeError(
                f"scale_loss was called {self._next + 1} times before a step - wrap_optimizer(num_loss="
                f"{self._num_loss}) said how many losses there are - pass a larger num_loss."
            )
        loss_id = self._next
        self._next += 1
        return self._amp_handle._scale_loss(loss, self._optimizer, loss_id)

    def step(self, closure: object = None) -> object:
        """Step the optimizer, unless a gradient overflowed."""
        self._next = 0
        if closure is None:
            return self._optimizer.step()
        return self._optimizer.step(closure)
