"""What one ``initialize`` call decided about a model, and how a forward runs under it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp import master_index, stray_weights
from ampcompat.amp.casts import OFF, Casts, cast_state, set_ambient
from ampcompat.amp.forward_casts import casts_for_forward, run_forward
from ampcompat.amp.observers import notify
from ampcompat.amp.trees import cast_tree, tensors_in


@dataclass(eq=False)
class ModelPolicy:
    """How the forward of a model runs. Shared by the model's copies; plain data when pickled.

    Attributes:
        opt_level: The level that the call asked for.
        casts: Function casts inside the forward.
        input_dtype: Floating inputs are cast to it (O0, O2, O3), or None.
        output_dtype: Floating outputs are cast to it, or None.
        half: The half dtype that the model's weights were cast to, or None where they stay float32.
        master_weights: Whether half weights have float32 masters.
    """

    opt_level: str
    casts: Casts
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    half: torch.dtype | None
    master_weights: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelPolicy:
        return self

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``forward(*args, **kwargs)`` under this policy."""
        if torch.compiler.is_compiling():
            return self._run_compiled(model, forward, args, kwargs)
        notify("on_forward", model, args, kwargs)
        output = self._run_eager(model, forward, args, kwargs)
        notify("on_output", model, output)
        return output

    def _run_eager(self, model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.half is not None and "_amp_stamp" not in model.__dict__:
            stray, running = _torch.run_untraced(self._look_at_weights, model), cast_state().thread.half_models
            running.append(model)
            try:
                with stray_weights.cast_for_forward(stray) if stray else nullcontext():
                    return self._run(model, forward, args, kwargs)
            finally:
                running.pop()
        return self._run(model, forward, args, kwargs)

    def _look_at_weights(self, model: torch.nn.Module) -> list[stray_weights.Slot]:
        """Restore the invariant of the masters; returns the weights that this forward must cast."""
        watch = model.__dict__.get("_amp_watch")
        if watch is not None:
            watch.look()
        if self.master_weights:
            master_index.reconcile_model(model)
        return stray_weights.strays(model)

    def _run(self, model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.input_dtype is not None:
            args, kwargs = cast_tree(args, self.input_dtype), kwargs and cast_tree(kwargs, self.input_dtype)
        output = self._run_with_casts(model, forward, args, kwargs)
        if self.output_dtype is None or (self.half is not None and _is_part_of_running(model)):
            return output
        return cast_tree(output, self.output_dtype)

    def _run_with_casts(self, model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        stamp: tuple[Casts | None, str] | None = model.__dict__.get("_amp_stamp")
        if stamp is not None:
            casts, device_type = stamp
        elif not self.casts.enabled and cast_state().found is None:
            return forward(*args, **kwargs)  # nobody casts functions: nothing to switch off
        else:
            device_type = _device_type(model)
            casts = casts_for_forward(self.casts, device_type)
        if casts is not None and casts.enabled and "choke points" not in state.rooms:
            # Unpickled in a process that has called no initialize.
            _torch.run_uncompiled(self._put_in_force, device_type)
        if casts is None or not (casts.enabled or cast_state().found):
            return forward(*args, **kwargs)
        return run_forward(casts, device_type, forward, args, kwargs)

    def _put_in_force(self, device_type: str) -> None:
        from ampcompat.amp import session

        session.cover_device_types([device_type])
        session.casting_policies().add(self)

    def _run_compiled(self, model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # What dynamo cannot trace stays out: version checks of masters (they are made at the step) and the thread's
        # state. A user's region is recognised by not being the ambient casts.
        if self.casts.enabled and "choke points" not in state.rooms:
            # Without fullgraph, the compiler falls back to an eager forward, which does that.
            raise RuntimeError(
                f"A model at {self.opt_level}, unpickled in a process without amp.initialize, is compiled - the rules"
                " of its casts are not in force yet, and a graph would be made without them - call the model once, or"
                " amp.initialize, before torch.compile."
            )
        if self.input_dtype is not None:
            args, kwargs = cast_tree(args, self.input_dtype), cast_tree(kwargs, self.input_dtype)
        # Not the model's own device: torch 2.4 cannot trace ``parameters()`` of every model.
        device_types = cast_state().device_types or tuple({t.device.type: None for t in tensors_in((args, kwargs))})
        output = self._in_graph(device_types, forward, args, kwargs)
        return output if self.output_dtype is None else cast_tree(output, self.output_dtype)

    def _in_graph(self, device_types: tuple[str, ...], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``forward`` with this policy's casts on ``device_types``, wherever the ambient casts are in force now."""
        if not device_types:
            return forward(*args, **kwargs)
        first, others = device_types[0], device_types[1:]
        now = Casts(torch.is_autocast_enabled(first), torch.get_autocast_dtype(first))
        ambient = cast_state().ambient if first in cast_state().device_types else OFF
        if not now.same_as(ambient) or now.same_as(self.casts):
            return self._in_graph(others, forward, args, kwargs)
        with torch.autocast(first, self.casts.dtype, enabled=self.casts.enabled, cache_enabled=False):
            return self._in_graph(others, forward, args, kwargs)

    def stamp(self, model: torch.nn.Module) -> tuple[Casts | None, str]:
        """What a DataParallel replica made in this thread runs with in its own thread."""
        device_type = _device_type(model)
        casts = casts_for_forward(self.casts, device_type)
        if casts is None:  # a user's region: hand on its dtype too, which torch does not
            casts = Casts(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        return casts, device_type


def _is_part_of_running(model: torch.nn.Module) -> bool:
    """Whether ``model`` runs inside the forward of a half model that it is a part of, and that goes on in half.

    ``amp.initialize([model, model.generator], ...)``: alone, the generator's outputs are float32.
    """
    around = cast_state().thread.half_models[:-1]
    return bool(around) and any(module is model for module in around[-1].modules())


def live_models() -> weakref.WeakSet[torch.nn.Module]:
    """Every initialized model that is still alive."""
    models: weakref.WeakSet[torch.nn.Module] = state.room("models", weakref.WeakSet)
    return models


def device_types_of(models: Any) -> set[str]:
    """Device types that hold parameters or buffers of ``models`` and that autocast knows."""
    return all_device_types_of(models) & set(_torch.autocast_device_types())


def all_device_types_of(models: Any) -> set[str]:
    """As :func:`device_types_of`, with those that autocast does not know."""
    modules = {module for model in models for module in model.modules()}
    tensors = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return {t.device.type for t in tensors}


def _first_of(module: torch.nn.Module, kind: str) -> torch.Tensor | None:
    """The first of ``module``'s "_parameters" or "_buffers", its children's included.

    As ``next(module.parameters(), None)``, whose nested generators would be the dearest part of an idle forward.
    """
    for tensor in getattr(module, kind).values():
        if tensor is not None:
            first: torch.Tensor = tensor
            return first
    for child in module._modules.values():
        found = None if child is None else _first_of(child, kind)
        if found is not None:
            return found
    return None


def _device_type(model: torch.nn.Module) -> str:
    """Where ``model`` is. A model moved since ``initialize`` moves the ambient casts along."""
    first = _first_of(model, "_parameters")
    if first is None:
        first = _first_of(model, "_buffers")
    room = cast_state()
    if first is None:
        return room.device_types[0] if room.device_types else "cpu"
    device_type = first.device.type
    if device_type not in room.device_types and room.found is not None:
        wanted = device_types_of(live_models())
        from ampcompat.amp import session

        session.cover_device_types(wanted)
        set_ambient(room.ambient, wanted)
    return device_type


__all__ = ["OFF", "ModelPolicy", "all_device_types_of", "device_types_of", "live_models"]
