"""The session: what one call of ``initialize`` owns, its options, its scalers, how its models run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampcompat._state import Part, state
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.casts.contexts import Casts
from ampcompat.amp.half.forward import ModelPolicy
from ampcompat.amp.properties import Properties
from ampcompat.amp.scaling.scaler import LossScaler


@dataclass(eq=False, repr=False)
class Session:
    """What one call of ``initialize`` (or of ``amp.init``, which is given no models) owns; optimizers lead to it.

    Attributes:
        properties: The options in force.
        half_dtype: What functions or weights are cast to.
        cast_outputs: The keyword ``cast_model_outputs``.
        scalers: One per ``num_losses``.
        by_init: Whether ``amp.init`` made it.
        has_models: Whether live models used its casts when these began, so only ever True at O1 and O4. If so, its
            ambient casts end when the last of these models is collected.
        steps: How many steps its optimizers have made or skipped, all together.
        enabled: False where ``initialize`` was called with ``enabled=False``: it owns nothing.
        policy: How its models run.
        casting_policies: Its policy, and the policies of other sessions in which ``amp.init`` has turned function casts
            on: these casts end with its own.
        device_types: Where its casts are in force.
    """

    properties: Properties
    half_dtype: torch.dtype = torch.float16
    cast_outputs: torch.dtype | None = None
    scalers: list[LossScaler] = field(default_factory=list)
    by_init: bool = False
    has_models: bool = False
    steps: int = 0
    enabled: bool = field(init=False)
    policy: ModelPolicy = field(init=False)
    casting_policies: list[ModelPolicy] = field(init=False)
    device_types: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.enabled = bool(self.properties.options["enabled"])
        self.policy = self._make_policy()
        self.casting_policies = [self.policy]

    @property
    def has_scaled(self) -> bool:
        """Whether its blocks may have left scaled gradients in tensors that its optimizers do not hold."""
        return any(scaler.scale is not None and not scaler.is_one for scaler in self.scalers)

    def _make_policy(self) -> ModelPolicy:
        options = self.properties.options
        model_dtype = options["cast_model_type"] or None  # False: no cast
        weights_dtype = model_dtype if model_dtype in HALF_DTYPES else None
        output_dtype = self.cast_outputs
        if output_dtype is None and model_dtype is not None:
            output_dtype = torch.float32
        return ModelPolicy(
            opt_level=options["opt_level"],
            casts=Casts(bool(options["patch_torch_functions"]), self.half_dtype),
            input_dtype=model_dtype,
            output_dtype=output_dtype,
            master_weights=bool(options["master_weights"]) and weights_dtype is not None,
        )


#: The session of blocks and handles for which amp is disabled (``initialize(enabled=False)``).
DISABLED = Session(Properties())


@dataclass(eq=False)
class SessionState(Part):
    """The latest session; earlier ones are found from their optimizers.

    Attributes:
        latest: The session of the latest call of ``initialize`` or ``amp.init``.
        loaded_scalers: Scales and clean passes that were loaded before a call of ``initialize`` with optimizers.
    """

    latest: Session | None = None
    loaded_scalers: list[tuple[float, int]] | None = None


session_state = state.add(SessionState())
