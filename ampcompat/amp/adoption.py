"""Which tensors an optimizer holds: masters where the model has half weights, and state that fits them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ampcompat.amp.master_index import ensure_master, master_of_half, master_of_value
from ampcompat.amp.masters import Master
from ampcompat.amp.properties import HALF_DTYPES

if TYPE_CHECKING:
    from ampcompat.amp.session import Session


def adopt_masters(optimizer: Any, session: Session | None = None) -> None:
    """Bring the params in ``optimizer``'s groups in line with the model: masters where it has half weights.

    With no ``session`` they are the model's own tensors.

    The groups and their lists keep their identity, and state that exists for a parameter is carried over to its master
    (or back, where an earlier call had masters and this one has none).
    """
    for group in optimizer.param_groups:
        params = group["params"]
        for index, param in enumerate(params):
            new = _stand_in(param, session)
            if new is not param:
                if param in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(param)
                params[index] = new  # last: an interrupted adoption is taken up again


def match_state(optimizer: Any) -> None:
    """Give the state of every param the param's dtype, as ``Optimizer.load_state_dict`` does.

    State that was loaded or gathered before ``initialize`` changed the dtype of the params would not fit them. An
    optimizer with a ``load_state_dict`` of its own decides for itself which dtype its state has.
    """
    optimizer = getattr(optimizer, "optim", optimizer)  # LARC
    if getattr(type(optimizer), "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:
        return
    for param, held in list(optimizer.state.items()):
        if not isinstance(param, torch.Tensor) or not isinstance(held, dict):
            continue
        wrong = {name for name, value in held.items() if name != "step" and _is_like(value, param)}
        if wrong:
            fit = {name: value.to(param.dtype) if name in wrong else value for name, value in held.items()}
            optimizer.state[param] = fit


def _is_like(value: Any, param: torch.Tensor) -> bool:
    """Whether ``value`` is floating state of ``param`` in another dtype."""
    is_state = isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape
    return is_state and value.dtype != param.dtype


def _stand_in(param: torch.Tensor, session: Session | None) -> torch.Tensor:
    master = master_of_value(param)
    if master is not None:
        if master.half.dtype == torch.float32:  # an earlier call's master of a weight that is float32 again
            return master.half
        return param if session is not None and session.properties.master_weights else master.half
    if session is None or not session.properties.master_weights or param.dtype not in HALF_DTYPES:
        return param
    master = master_of_half(param)
    if master is None:
        home = session.home_of(param)
        master = Master(param) if home is None else ensure_master(*home)
    return master.value
