"""The class of a model under amp: a dynamic subclass of its own class, so that it stays what it was.

``isinstance``, ``repr``, ``super().forward``, hooks, deepcopy, pickle and ``model.forward(x)`` go on working because
the instance is the same and only ``forward`` is overridden. The policy sits on the instance: an object that the user's
own code makes by ``type(model)(...)`` has none and is a plain model. apex replaced ``model.forward`` by a closure over
the original model (``apex/amp/_initialize.py: patch_forward``), with which copies computed with the original's weights.
"""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat.amp.casts.ambience import end_casts_with
from ampcompat.amp.casts.contexts import OFF, Casts, cast_state, disabled_depth
from ampcompat.amp.half.devices import device_type_of, model_index, move_casts_to
from ampcompat.amp.half.forward import Forward, ModelPolicy
from ampcompat.amp.half.masters import push_written
from ampcompat.amp.half.record import ATTRIBUTE as HALF_WEIGHTS
from ampcompat.amp.half.record import check_replaced, masters_of, record_of
from ampcompat.amp.half.saving import hook


class AmpModel:
    """First base of every dynamic subclass, before the model's own class, which is its ``_amp_of``."""

    _amp_of: Any
    _amp_policy: ModelPolicy | None = None

    def __init_subclass__(cls, _amp: bool = False, **kwargs: object) -> None:
        """Skip the user's ``__init_subclass__``, so that registries of the user's class do not see our subclass."""
        if not _amp:
            super().__init_subclass__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make a copy as one of the model's own class, and put it under amp."""
        cls = self._amp_of
        reduced = cls.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        build, args, *rest = reduced
        subclass = amp_class(cls)
        args = tuple(cls if arg is subclass else arg for arg in args)
        return (rebuild, (build, args), *rest)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which asks each module for what to compile in its place."""
        raise RuntimeError(
            f"torch.jit.script got a {self._amp_of.__name__} under amp - TorchScript cannot compile the casts around"
            " its forward - script amp.unwrap(model), a plain float32 copy, or use torch.jit.trace."
        )

    def _replicate_for_data_parallel(self: Any) -> Any:
        """Give DataParallel a replica, whose stamp carries the casts into its thread."""
        policy: ModelPolicy | None = self._amp_policy
        if policy is not None and policy.master_weights:
            push_written(masters_of(self))  # here and not in the replicas, which run in threads
        replica = self._amp_of._replicate_for_data_parallel(self)
        if policy is not None:
            device_type = device_type_of(self)
            move_casts_to(device_type)
            replica.__dict__["_amp_stamp"] = _casts_for_replica(policy, device_type), device_type
        return replica


def _casts_for_replica(policy: ModelPolicy, device_type: str) -> Casts:
    """Return the casts that a replica of DataParallel's brings along into its own thread."""
    if disabled_depth():
        return OFF
    if cast_state.thread.regions.get(device_type):  # a user's region: hand its dtype on too, which torch does not do
        return Casts(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    return policy.casts


# -- the policy of an instance -----------------------------------------------------------------------------------------
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
        model_index.live.discard(model)
        cast_state.models.discard(model)
        return
    if not isinstance(model, AmpModel):
        _torch.set_class(model, amp_class(type(model)))
    object.__setattr__(model, "_amp_policy", policy)
    own_forward = model.__dict__.get("forward")
    if own_forward is not None and not isinstance(own_forward, InstanceForward):
        object.__setattr__(model, "forward", InstanceForward(model, own_forward))
    model_index.live.add(model)
    end_casts_with(model)


def _take_policy_off(model: torch.nn.Module) -> None:
    """Make ``model`` a plain module of its own class again."""
    if not isinstance(model, AmpModel):
        return
    own_forward = model.__dict__.get("forward")
    if isinstance(own_forward, InstanceForward):
        object.__setattr__(model, "forward", own_forward.inner)
    model.__dict__.pop("_amp_policy", None)
    _torch.set_class(model, _own_class(model))


# -- the dynamic subclass ----------------------------------------------------------------------------------------------
def amp_class(cls: Any) -> Any:
    """Return the dynamic subclass of ``cls``, which is made once per class."""
    for known in type.__subclasses__(cls):  # past the user's metaclass, as below
        if known.__dict__.get("_amp_of") is cls:
            return known
    body: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__class__": property(_class_of, _change_class),
        "_amp_of": cls,
        "forward": _forward_over(cls),
    }
    if hasattr(cls, "__deepcopy__"):
        body["__deepcopy__"] = _deepcopy
    if _torch.is_graph_module(cls):
        body["recompile"] = _recompile
    # Past the user's metaclass, which may count or rename classes; what it set on the class is inherited. An abstract
    # class keeps caches of its own, which only ABCMeta makes.
    base = abc.ABCMeta if isinstance(cls, abc.ABCMeta) else type
    return base.__new__(type(cls), cls.__name__, (AmpModel, cls), body, _amp=True)


def _forward_over(cls: Any) -> Callable[..., object]:
    """Make the ``forward`` of the dynamic subclass, which runs the forward of ``cls`` under a policy."""
    declared = inspect.getattr_static(cls, "forward")
    bind = _binding_of(declared, cls)

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        policy = self._amp_policy
        bound = bind(self)
        if policy is None or isinstance(self.__dict__.get("forward"), InstanceForward):
            return bound(*args, **kwargs)
        return policy.run(self, bound, args, kwargs)

    return _torch.with_parameters_of(cls.forward, forward) if isinstance(declared, FunctionType) else forward


def _binding_of(declared: Any, cls: Any) -> Callable[[Any], Callable[..., object]]:
    """Return what binds ``declared``, which stands as ``forward`` in ``cls``, to a model, as an attribute is bound.

    The compiler traces the first two, and no call of ``__get__``.
    """
    if _is_bound_to_no_instance(declared):
        unbound = cls.forward
        return lambda model: unbound
    if isinstance(declared, (FunctionType, functools.partial)):
        # A function is read from the class at each call: a script may patch it there.
        return lambda model: functools.partial(cls.forward, model)
    return lambda model: type(declared).__get__(declared, model, cls)


#: What a class hands to each of its instances without binding it to them. From Python 3.14 on, it binds a partial.
_BOUND_TO_NO_INSTANCE: tuple[type, ...] = (staticmethod, classmethod, MethodType, BuiltinFunctionType)
if sys.version_info < (3, 14):
    _BOUND_TO_NO_INSTANCE = (*_BOUND_TO_NO_INSTANCE, functools.partial)


def _is_bound_to_no_instance(declared: Any) -> bool:
    """Whether all instances of a class in which ``declared`` stands get the same, which takes no ``self``."""
    return isinstance(declared, _BOUND_TO_NO_INSTANCE) or not hasattr(type(declared), "__get__")


def _deepcopy(model: Any, memo: dict[int, Any]) -> Any:
    """``__deepcopy__`` of the dynamic subclass, if the model's own class has one.

    Such a method makes an object of ``self.__class__`` and copies attributes into it; where it copies the policy too,
    the copy is one under amp.
    """
    cls = model._amp_of
    with _as_plain(model):
        clone = cls.__deepcopy__(model, memo)
    if _torch.is_graph_module(cls):  # it copies the attributes that its graph reads
        for name in {"_amp_policy", HALF_WEIGHTS}.intersection(model.__dict__):
            clone.__dict__[name] = copy.deepcopy(model.__dict__[name], memo)
    return _put_under_amp(clone) if "_amp_policy" in clone.__dict__ else clone


def _recompile(model: Any) -> Any:
    """``recompile`` of the dynamic subclass of a graph module, which sets ``forward`` on its class."""
    cls = model._amp_of
    with _as_plain(model):
        code = cls.recompile(model)
    amp_class(cls).forward = _forward_over(cls)
    return code


# -- the class of an instance ------------------------------------------------------------------------------------------
def _class_of(model: Any) -> Any:
    """Answer for ``model.__class__``: the model's own class, for ``super(self.__class__, self)`` and comparisons.

    The compiler looks methods up in ``__class__``, and must find amp's ``forward`` there.
    """
    return type(model) if _torch.is_tracing() else _own_class(model)


def _own_class(model: Any) -> Any:
    """Return the class of ``model`` as it would be without amp; one that a script has derived from ours stays."""
    cls = type(model)
    return vars(cls).get("_amp_of", cls)


def _change_class(model: Any, cls: Any) -> None:
    """Keep the model under amp at ``model.__class__ = cls``, which parametrizations and ``fully_shard`` set.

    ``fully_shard`` has replaced the parameters before: they must not have masters yet.
    """
    _torch.set_class(model, cls if issubclass(cls, AmpModel) else amp_class(cls))
    check_replaced(masters_of(model))


@contextmanager
def _as_plain(model: Any) -> Iterator[None]:
    """Context in which the type of ``model`` is its own class."""
    under_amp = type(model)
    _torch.set_class(model, _own_class(model))
    try:
        yield
    finally:
        _torch.set_class(model, under_amp)


# -- copies ------------------------------------------------------------------------------------------------------------
def rebuild(build: Any, args: tuple[Any, ...]) -> torch.nn.Module:
    """Make a copy of a model under amp (deepcopy, unpickling); its state, the policy included, may follow."""
    model: torch.nn.Module = build(*args)
    return _put_under_amp(model)


def _put_under_amp(model: torch.nn.Module) -> torch.nn.Module:
    """Give a copy of a model under amp its class, and the hooks of its half weights where the copy has lost them."""
    if not isinstance(model, AmpModel):
        _torch.set_class(model, amp_class(type(model)))
    record = record_of(model)
    if record is not None and not model._state_dict_hooks:
        record.hooks.clear()
        hook(model)
    end_casts_with(model)
    return model
