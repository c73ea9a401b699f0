"""A model under amp: a dynamic subclass of its own class, so that it stays what it was, and how its forward runs.

``isinstance``, ``repr``, ``super().forward``, hooks, deepcopy, pickle and ``model.forward(x)`` go on working because
the instance is the same and only ``forward`` is overridden. The policy sits on the instance: an object that the user's
own code makes by ``type(model)(...)`` has none and is a plain model. apex replaced ``model.forward`` by a closure over
the original model (``apex/amp/_initialize.py: patch_forward``), with which copies computed with the original's weights.
"""

from __future__ import annotations

import abc
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import say_once
from ampcompat._state import state
from ampcompat.amp._amp_state import _amp_state
from ampcompat.amp.casts import OFF, Casts, CastsOff, ForwardCasts, disabled_depth, is_decided
from ampcompat.amp.casts.ambience import follow_lifetime, install_casting, set_ambient
from ampcompat.amp.casts.trees import cast_tree, tensors_in
from ampcompat.amp.half_weights import ATTRIBUTE as HALF_WEIGHTS
from ampcompat.amp.half_weights import half_weights
from ampcompat.amp.hints import add_hint
from ampcompat.amp.masters import masters_of, own_tensors, refresh
from ampcompat.amp.observers import notify
from ampcompat.amp.weights import cast_weights, hook

Forward = Callable[..., object]
Args = tuple[object, ...]
Kwargs = dict[str, object]


@dataclass(eq=False)
class ModelPolicy:
    """How a model's forward runs, as one ``initialize`` call decided. Shared by copies; plain data when pickled."""

    opt_level: str
    casts: Casts  # function casts inside the forward
    input_dtype: torch.dtype | None  # floating inputs are cast to it (not at O1 and O4)
    output_dtype: torch.dtype | None  # floating outputs are cast to it
    half_dtype: torch.dtype | None  # the weights were cast to it; None where they stay float32
    master_weights: bool  # whether half weights have float32 masters
    deactivated: bool = False  # function casts were ended; a later call that casts functions begins them again

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
        """``forward(*args, **kwargs)`` of ``model`` under this policy."""
        if torch.compiler.is_compiling():
            return self._run_compiled(forward, args, kwargs)
        if self._lacks_patches():
            _torch.run_uncompiled(install_casting, [_device_type(model)])
            return _torch.run_uncompiled(self.run, model, forward, args, kwargs)
        if state.observers:
            notify("on_forward", model, args, kwargs)
        is_replica = "_amp_stamp" in model.__dict__  # of DataParallel's, in a thread of its own
        try:
            if self.half_dtype is not None and not is_replica:
                output = self._run_half(model, forward, args, kwargs)
            else:
                output = self._call(model, forward, args, kwargs)
                if self.output_dtype is not None:
                    output = cast_tree(output, self.output_dtype)
        except Exception as error:
            _explain_failure(model, error)
            raise
        if state.observers:
            notify("on_output", model, output)
        return output

    def _lacks_patches(self) -> bool:
        """Whether casts are wanted that nothing makes: of a model unpickled in a process without ``initialize``."""
        return self.casts.enabled and state.casts.patches is None

    # -- eager ---------------------------------------------------------------------------------------------------------
    def _run_half(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run a model of half weights: bring them up to date with their masters, and note that it is running."""
        running = state.casts.thread.running
        around = running[-1] if running else None
        running.append(model)
        try:
            if self.master_weights:
                refresh(masters_of(model))
            output = self._call(model, forward, args, kwargs)
        finally:
            running.pop()
        if self.output_dtype is None:
            return output
        # Of ``initialize([model, model.generator], ...)``, the generator gives the model around it half outputs.
        is_part = around is not None and any(part is model for part in around.modules())
        if is_part:
            return output
        return cast_tree(output, self.output_dtype)

    def _call(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Call ``forward`` on inputs of this policy's dtype, with this policy's casts on, or all casts off."""
        if self.input_dtype is not None:
            args = cast_tree(args, self.input_dtype)
            kwargs = kwargs and cast_tree(kwargs, self.input_dtype)
        no_policy_casts = state.casts.original is None and not self.casts.enabled
        if no_policy_casts:  # nothing to switch off
            return forward(*args, **kwargs)
        casts = self._casts_for(model, args)
        if casts is None:
            return forward(*args, **kwargs)
        with casts:
            return forward(*args, **kwargs)

    def _casts_for(self, model: torch.nn.Module, args: Args) -> ForwardCasts | CastsOff | None:
        """Return the context for a forward of ``model``.

        None in an autocast region of the user's, who decides, and on a device that torch cannot autocast.
        """
        stamp: tuple[Casts, str] | None = model.__dict__.get("_amp_stamp")
        if stamp is not None:  # a replica of DataParallel's carries its casts into its thread
            casts, device_type = stamp
            return ForwardCasts(casts, device_type) if casts.enabled else CastsOff()
        thread = state.casts.thread
        device_type = _device_type(model, args)
        if disabled_depth():
            return CastsOff()
        if thread.regions.get(device_type):
            return None
        if not self.casts.enabled:
            return CastsOff()
        if device_type not in state.casts.device_types and not _torch.can_autocast(device_type):
            return None
        return ForwardCasts(self.casts, device_type)

    # -- compiled ------------------------------------------------------------------------------------------------------
    def _run_compiled(self, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run ``forward`` as the compiler traces it.

        Left out is what dynamo cannot trace: checks of masters (the step makes them), observers, and the thread's
        state. Whether the script or a forward around has set casts is read from autocast's state.
        """
        if self._lacks_patches():
            # Without fullgraph, the compiler falls back to an eager forward, which installs them.
            raise RuntimeError(
                f"A model at {self.opt_level}, unpickled in a process without amp.initialize, is compiled - the rules"
                " of its casts are not in force yet, and a graph would be made without them - call the model once, or"
                " amp.initialize, before torch.compile."
            )
        if self.input_dtype is not None:
            args = cast_tree(args, self.input_dtype)
            kwargs = cast_tree(kwargs, self.input_dtype)
        device_types = state.casts.device_types
        if not device_types:  # of a model that was unpickled: no ``initialize`` has named any
            # Not the model's own device: torch 2.4 cannot trace ``parameters()`` of every model.
            device_types = tuple({tensor.device.type: None for tensor in tensors_in((args, kwargs))})
        output = self._call_in_graph(device_types, forward, args, kwargs)
        if self.output_dtype is None:
            return output
        return cast_tree(output, self.output_dtype)

    def _call_in_graph(self, device_types: tuple[str, ...], forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Call ``forward`` with this policy's casts on ``device_types``.

        Casts that the script or a forward around has set stay as they are.
        """
        if not device_types:
            return forward(*args, **kwargs)
        first = device_types[0]
        others = device_types[1:]
        now = Casts(torch.is_autocast_enabled(first), torch.get_autocast_dtype(first))
        if now.same_as(self.casts) or is_decided(first, now):
            return self._call_in_graph(others, forward, args, kwargs)
        with torch.autocast(first, self.casts.dtype, enabled=self.casts.enabled, cache_enabled=False):
            return self._call_in_graph(others, forward, args, kwargs)


# -- failed forwards ---------------------------------------------------------------------------------------------------
def _explain_failure(model: torch.nn.Module, error: Exception) -> None:
    """Add a hint to an error of torch's own that mixed precision provokes."""
    if state.observers:
        notify("on_failure", error)
    if isinstance(error, RuntimeError):
        _note_wide_weight(model, error)
    add_hint(error, model)


def _note_wide_weight(model: torch.nn.Module, error: RuntimeError) -> None:
    """Name the first parameter of ``model`` that is not half in a module that amp has cast to half."""
    for module in model.modules():
        record = half_weights(module)
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


# -- where models are --------------------------------------------------------------------------------------------------
@_torch.eager
def device_types_of(models: Iterable[torch.nn.Module]) -> set[str]:
    """Device types that hold parameters or buffers of ``models``."""
    modules = itertools.chain.from_iterable(map(torch.nn.Module.modules, models))  # scripts override ``parameters()``
    return {tensor.device.type for module in modules for _, tensor in own_tensors(module)}


@_torch.eager
def _device_type(model: torch.nn.Module, args: Args = ()) -> str:
    """Return the device type of ``model``. A model moved since ``initialize`` moves the ambient casts along.

    A model without tensors computes where its arguments are.
    """
    ambience = state.casts
    tensor = _first_tensor(model)
    if tensor is None:
        device_types = [tensor.device.type for tensor in tensors_in(args)] or ambience.device_types
        return device_types[0] if device_types else "cpu"
    device_type = str(tensor.device.type)
    was_moved = device_type not in ambience.device_types
    if was_moved and ambience.original is not None:
        wanted = device_types_of(state.models.live) & set(_torch.autocast_device_types())
        install_casting(wanted)
        set_ambient(wanted)
    return device_type


def _first_tensor(model: torch.nn.Module) -> torch.Tensor | None:
    """Return a parameter of ``model``, or a buffer of one that has none; None if it has neither."""
    for module in model.modules():  # not ``model.parameters()``, which is slower
        for param in module._parameters.values():
            if param is not None:
                return param
    return next(model.buffers(), None)


# -- the dynamic subclass ----------------------------------------------------------------------------------------------
class AmpModel:
    """Marker base of the dynamic subclasses."""

    _amp_policy: ModelPolicy | None = None

    def __init_subclass__(cls, _amp: bool = False, **kwargs: object) -> None:
        """Skip the user's ``__init_subclass__``, so that registries of the user's class do not see our subclass."""
        if not _amp:
            super().__init_subclass__(**kwargs)


class InstanceForward:
    """Wraps a ``forward`` that an instance has of its own (``self.forward = self.impl``, a user's patch)."""

    def __init__(self, model: torch.nn.Module, inner: Forward) -> None:
        self.model = model
        self.inner = inner
        functools.update_wrapper(self, inner, updated=())

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the instance's forward under the model's policy."""
        policy: ModelPolicy | None = getattr(self.model, "_amp_policy", None)
        if policy is None:
            return self.inner(*args, **kwargs)
        return policy.run(self.model, self.inner, args, kwargs)


def set_policy(model: torch.nn.Module, policy: ModelPolicy | None) -> None:
    """Make ``model`` run under ``policy``, or with None as a plain module of its own class again."""
    if policy is None:
        _take_policy_off(model)
        state.models.live.discard(model)
        state.casts.models.discard(model)
        return
    if not isinstance(model, AmpModel):
        _torch.set_class(model, amp_class(type(model)))
    object.__setattr__(model, "_amp_policy", policy)
    own_forward = model.__dict__.get("forward")
    if own_forward is not None and not isinstance(own_forward, InstanceForward):
        object.__setattr__(model, "forward", InstanceForward(model, own_forward))
    state.models.live.add(model)
    follow_lifetime(model)


def _take_policy_off(model: torch.nn.Module) -> None:
    """Make ``model`` a plain module of its own class again."""
    if not isinstance(model, AmpModel):
        return
    own_forward = model.__dict__.get("forward")
    if isinstance(own_forward, InstanceForward):
        object.__setattr__(model, "forward", own_forward.inner)
    model.__dict__.pop("_amp_policy", None)
    _torch.set_class(model, _own_class(model))


def amp_class(cls: Any) -> Any:
    """The dynamic subclass of ``cls``, made once per class."""
    # Past the user's metaclass, as below.
    for known in type.__subclasses__(cls):
        if known.__dict__.get("_amp_of") is cls:
            return known

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        build, args, *rest = reduced
        args = tuple(cls if arg is made else arg for arg in args)
        return (rebuild, (build, args), *rest)

    def _replicate_for_data_parallel(self: Any) -> Any:
        policy: ModelPolicy | None = self._amp_policy
        if policy is not None and policy.master_weights:
            refresh(masters_of(self))  # here and not in the replicas, which run in threads
        replica = super(made, self)._replicate_for_data_parallel()
        if policy is not None:
            device_type = _device_type(self)
            replica.__dict__["_amp_stamp"] = _casts_for_replica(policy, device_type), device_type
        return replica

    body: dict[str, Any] = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body |= {"_amp_of": cls, "forward": _forward_over(cls), "__class__": property(_class_of, _change_class)}
    body |= {"__reduce_ex__": __reduce_ex__, "_replicate_for_data_parallel": _replicate_for_data_parallel}
    if hasattr(cls, "__deepcopy__"):
        body["__deepcopy__"] = _deepcopy_over(cls)
    if _torch.is_graph_module(cls):
        body["recompile"] = _recompile_over(cls)
    # Past the user's metaclass, which may count or rename classes; what it set on the class is inherited. An abstract
    # class keeps caches of its own, which only ABCMeta makes.
    base = abc.ABCMeta if isinstance(cls, abc.ABCMeta) else type
    made: Any = base.__new__(type(cls), cls.__name__, (AmpModel, cls), body, _amp=True)
    return made


def _forward_over(cls: Any) -> Callable[..., object]:
    """Make the ``forward`` of the dynamic subclass: that of ``cls`` under the policy of the instance."""

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        policy = self._amp_policy
        bound = functools.partial(cls.forward, self)
        if policy is None or isinstance(self.__dict__.get("forward"), InstanceForward):
            return bound(*args, **kwargs)
        return policy.run(self, bound, args, kwargs)

    return _torch.with_parameters_of(cls.forward, forward)


def _deepcopy_over(cls: Any) -> Callable[..., object]:
    """Make the ``__deepcopy__`` of the dynamic subclass of ``cls``, which has one of its own.

    Such a method makes an object of ``self.__class__`` and copies attributes into it; where it copies the policy too,
    the copy is one under amp.
    """

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        with _as_plain(self):
            clone = cls.__deepcopy__(self, memo)
        if _torch.is_graph_module(cls):  # it copies the attributes that its graph reads
            for name in {"_amp_policy", HALF_WEIGHTS}.intersection(self.__dict__):
                clone.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return _put_under_amp(clone) if "_amp_policy" in clone.__dict__ else clone

    return __deepcopy__


def _recompile_over(cls: Any) -> Callable[..., object]:
    """Make the ``recompile`` of the dynamic subclass of ``cls``, a graph module: it sets ``forward`` on its class."""

    def recompile(self: Any) -> Any:
        with _as_plain(self):
            code = cls.recompile(self)
        amp_class(cls).forward = _forward_over(cls)
        return code

    return recompile


# -- the class of an instance ------------------------------------------------------------------------------------------
def _class_of(model: Any) -> Any:
    """Answer for ``model.__class__``: the model's own class, for ``super(self.__class__, self)`` and comparisons.

    The compiler looks methods up in ``__class__``, and must find amp's ``forward`` there.
    """
    return type(model) if _torch.is_tracing() else _own_class(model)


def _own_class(model: Any) -> Any:
    """The class of ``model`` as it would be without amp; one that a script has derived from ours stays."""
    cls = type(model)
    return vars(cls).get("_amp_of", cls)


def _change_class(model: Any, cls: Any) -> None:
    """Follow ``model.__class__ = cls``, as of a parametrization or ``fully_shard``: the model stays under amp."""
    _torch.set_class(model, cls if issubclass(cls, AmpModel) else amp_class(cls))


@contextmanager
def _as_plain(model: Any) -> Iterator[None]:
    """Context in which the type of ``model`` is its own class."""
    under_amp = type(model)
    _torch.set_class(model, _own_class(model))
    try:
        yield
    finally:
        _torch.set_class(model, under_amp)


def _casts_for_replica(policy: ModelPolicy, device_type: str) -> Casts:
    """Return the casts that a replica of DataParallel's brings along into its own thread."""
    thread = state.casts.thread
    if disabled_depth():
        return OFF
    if thread.regions.get(device_type):  # a user's region: hand on its dtype too, which torch does not
        return Casts(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    return policy.casts


def rebuild(build: Any, args: tuple[Any, ...]) -> torch.nn.Module:
    """Make a copy of a model under amp (deepcopy, unpickling); its state, the policy included, may follow."""
    model: torch.nn.Module = build(*args)
    return _put_under_amp(model)


def _put_under_amp(model: torch.nn.Module) -> torch.nn.Module:
    """Give a copy of a model under amp its class, and the hooks of its half weights if making it has lost them."""
    if not isinstance(model, AmpModel):
        _torch.set_class(model, amp_class(type(model)))
    record = half_weights(model)
    has_lost_hooks = record is not None and not model._state_dict_hooks
    if record is not None and has_lost_hooks:
        record.hooks.clear()
        hook(model, record.dtype, record.has_masters)
    follow_lifetime(model)
    return model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return a plain copy of ``model``: its own class, float32 weights, nothing of amp left on it.

    For export (``torch.export``, ``torch.fx``, ``torch.jit``, ONNX), for saving a whole model that loads where
    ampcompat is not installed, and for evaluation in float32. ``model`` itself is not changed; you can continue to
    train it. apex had no such call.

    Args:
        model: A model given to ``amp.initialize``, or any module around or inside one. DDP, DataParallel and
            ``torch.compile`` around it are taken off.

    Returns:
        A deep copy whose half weights are float32 again: the masters' values where there are masters (bitwise what
        ``model.state_dict()`` says), the widened half ones at O3. Casts that O1 has put in force for code outside
        models apply to it as to any code: run it under ``amp.disable_casts()`` for pure float32.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"amp.unwrap got {type(model).__name__} - it takes a model - pass the module.")
    model = _torch.uncompiled(model)
    while _torch.parallel_wrapper(model):
        model = _torch.uncompiled(model.get_submodule("module"))
    policies = [module.__dict__.get("_amp_policy") for module in model.modules()]
    with torch.inference_mode(False):
        plain = copy.deepcopy(model, {id(policy): policy for policy in policies})  # which print no note then
        modules = list(plain.modules())
        cast_weights(modules, None, ExitStack())
    for module in modules:
        set_policy(module, None)
    return plain
