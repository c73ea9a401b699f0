"""How the forward of a model under amp runs: its inputs and outputs cast, its masters followed, its functions cast.

Each model leads to its policy (``model._amp_policy``), which the dynamic subclass in
:mod:`ampcompat.amp.half.model_class` calls in the place of the model's own ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._log import say_once
from ampcompat._types import HALF_DTYPES
from ampcompat.amp._amp_state import _amp_state
from ampcompat.amp.casts.ambience import install_casting, model_collected
from ampcompat.amp.casts.contexts import Casts, CastsOff, ForwardCasts, cast_state, disabled_depth, leaves_casts_alone
from ampcompat.amp.casts.trees import cast_tree, tensors_in
from ampcompat.amp.half.devices import device_type_of, move_casts_to
from ampcompat.amp.half.masters import push_written
from ampcompat.amp.half.record import masters_of, own_tensors, record_of
from ampcompat.amp.hints import add_hint, hint_for
from ampcompat.amp.observers import notify, observer_state

Forward = Callable[..., object]
Args = tuple[object, ...]
Kwargs = dict[str, object]


@dataclass(eq=False)
class ModelPolicy:
    """How a model's forward runs, as its session decided. Shared by copies; plain data when pickled.

    Attributes:
        opt_level: As in ``initialize``.
        casts: Function casts inside the forward.
        input_dtype: Weights and floating inputs are cast to it; None at O1 and O4.
        output_dtype: Floating outputs are cast to it, as in apex also where the caller is another model; None leaves
            them.
        master_weights: Whether half weights have float32 masters.
        half_dtype: The half dtype that weights were cast to; None where they stay float32.
    """

    opt_level: str
    casts: Casts
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    master_weights: bool
    half_dtype: torch.dtype | None = field(init=False)

    def __post_init__(self) -> None:
        self.half_dtype = self.input_dtype if self.input_dtype in HALF_DTYPES else None

    def steps_like(self, other: ModelPolicy) -> bool:
        """Whether optimizers of models under both policies step the same kind of weights with the same gradients."""
        return (
            self.opt_level == other.opt_level
            and self.casts == other.casts
            and self.half_dtype == other.half_dtype
            and self.master_weights == other.master_weights
        )

    def __deepcopy__(self, memo: dict[int, object]) -> ModelPolicy:
        if self.half_dtype is not None and _amp_state.verbosity > 0:
            say_once(
                "half average",
                f"Note: a deepcopy of a model with {self.half_dtype} weights. If it is to be a moving average, average"
                " over state_dict() values (at O2 and O5 the float32 masters): over parameters(), small updates round"
                " to nothing (with a decay of 0.9999, all).",
            )
        return self

    def run(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Call ``forward(*args, **kwargs)`` of ``model`` under this policy."""
        if torch.compiler.is_compiling():
            return self._run_compiled(forward, args, kwargs)
        casts_not_installed = self.casts.enabled and cast_state.patches is None
        if casts_not_installed:  # unpickled in a process without ``initialize``, or after a reset
            _torch.run_uncompiled(install_casting, [device_type_of(model)])
            return _torch.run_uncompiled(self.run, model, forward, args, kwargs)
        if observer_state.observers:
            notify("on_forward", model, args, kwargs)
        is_replica = "_amp_stamp" in model.__dict__  # made by DataParallel, in a thread of its own
        try:
            if self.master_weights and not is_replica:  # the original of a replica has followed its masters
                push_written(masters_of(model))
            output = self._call(model, forward, args, kwargs)
        except Exception as error:
            _explain_failure(model, error)
            raise
        if observer_state.observers:
            notify("on_output", model, output)
        return output

    # -- eager ---------------------------------------------------------------------------------------------------------
    def _call(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Call ``forward`` on inputs of this policy's dtype, with this policy's casts on, or all casts off."""
        if self.input_dtype is not None:
            args = cast_tree(args, self.input_dtype)
            if kwargs:
                kwargs = cast_tree(kwargs, self.input_dtype)
        casts = None
        if cast_state.original is not None or self.casts.enabled:  # otherwise there is nothing to switch off
            casts = self._casts_for(model, args)
        if casts is None:
            output = forward(*args, **kwargs)
        else:
            with casts:
                output = forward(*args, **kwargs)
        return output if self.output_dtype is None else cast_tree(output, self.output_dtype)

    def _casts_for(self, model: torch.nn.Module, args: Args) -> ForwardCasts | CastsOff | None:
        """Return the context for a forward of ``model``.

        None inside the user's autocast region, which decides, and on a device that torch cannot autocast.
        """
        if cast_state.collected_in_trace:
            model_collected()
        stamp: tuple[Casts, str] | None = model.__dict__.get("_amp_stamp")
        if stamp is not None:  # a replica, which carries its casts into its thread
            casts, device_type = stamp
        else:
            casts = self.casts
            device_type = device_type_of(model, args)
            if device_type not in cast_state.device_types:
                move_casts_to(device_type)
            if disabled_depth():
                return CastsOff()
            if cast_state.thread.regions.get(device_type):
                return None
        if not casts.enabled:
            return CastsOff()
        if device_type not in cast_state.device_types and not _torch.can_autocast(device_type):
            return None
        return ForwardCasts(casts, device_type)

    # -- compiled ------------------------------------------------------------------------------------------------------
    def _run_compiled(self, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run ``forward`` as the compiler traces it.

        It leaves out what dynamo cannot trace: checks of masters (the step makes them), observers, and the thread's
        state. Autocast's state tells whether the script or a forward around has set casts.
        """
        if self.casts.enabled and cast_state.patches is None:
            # Without fullgraph, the compiler falls back to an eager forward, which installs them.
            raise RuntimeError(
                f"A model at {self.opt_level}, unpickled in a process without amp.initialize, is compiled - the rules"
                " of its casts are not in force yet, and a graph would be made without them - call the model once, or"
                " amp.initialize, before torch.compile."
            )
        if self.input_dtype is not None:
            args = cast_tree(args, self.input_dtype)
            if kwargs:
                kwargs = cast_tree(kwargs, self.input_dtype)
        device_types = cast_state.device_types
        if not device_types:  # the model was unpickled: no ``initialize`` has named any
            # Not the model's own device: torch 2.4 cannot trace ``parameters()`` of every model.
            device_types = tuple({tensor.device.type: None for tensor in tensors_in((args, kwargs))})
        output = self._call_in_graph(device_types, forward, args, kwargs)
        return output if self.output_dtype is None else cast_tree(output, self.output_dtype)

    def _call_in_graph(self, device_types: tuple[str, ...], forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Call ``forward`` with this policy's casts on ``device_types``.

        Casts that the script or a forward around has set stay as they are.
        """
        if not device_types:
            return forward(*args, **kwargs)
        first = device_types[0]
        others = device_types[1:]
        now = Casts(torch.is_autocast_enabled(first), torch.get_autocast_dtype(first))
        if now.same_as(self.casts) or leaves_casts_alone(first, now):
            return self._call_in_graph(others, forward, args, kwargs)
        with torch.autocast(first, self.casts.dtype, enabled=self.casts.enabled, cache_enabled=False):
            return self._call_in_graph(others, forward, args, kwargs)


# -- failed forwards ---------------------------------------------------------------------------------------------------
def _explain_failure(model: torch.nn.Module, error: Exception) -> None:
    """Add a hint to an error of torch's own that mixed precision provokes."""
    if observer_state.observers:
        notify("on_failure", error)
    if isinstance(error, RuntimeError) and hint_for(error) is not None:
        _name_wide_weight(model, error)
    add_hint(error, model)


def _name_wide_weight(model: torch.nn.Module, error: RuntimeError) -> None:
    """Name the first parameter of ``model`` that is not half in a module that amp has cast to half."""
    for module in model.modules():
        record = record_of(module)
        if record is None:
            continue
        for name, tensor in own_tensors(module):
            is_param = name in module._parameters
            if not is_param or not tensor.is_floating_point() or tensor.dtype == record.dtype:
                continue
            _torch.add_note(  # functional_call has given it
                error,
                f"ampcompat: {name!r} of a {type(module).__name__} is {tensor.dtype} in this forward, in a model that"
                f" amp.initialize cast to {record.dtype} - the forward of a half model needs half weights - pass"
                f" functional_call values cast to {record.dtype}, leave out model.float(), or use opt_level='O1'"
                " (D33).",
            )
            return
