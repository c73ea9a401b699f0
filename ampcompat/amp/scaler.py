"""apex's module of the loss scaler (``apex/amp/scaler.py``)."""

from __future__ import annotations

from ampcompat.amp._amp_state import master_params
from ampcompat.amp.scaling.scaler import LossScaler

__all__ = ["LossScaler", "master_params"]
