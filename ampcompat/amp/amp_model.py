"""A model under amp: a dynamic subclass of its own class, so that it stays what it was.

``isinstance``, ``repr``, ``super().forward``, hooks, deepcopy, pickle and ``model.forward(x)`` go on working because
the instance is the same and only ``forward`` is overridden. The policy sits on the instance: an object that the user's
own code makes by ``type(model)(...)`` has none and is a plain model.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import torch

from ampcompat._state import state
from ampcompat.amp import half_average, stray_weights
from ampcompat.amp.master_index import reconcile_model
from ampcompat.amp.policy import ModelPolicy, live_models


class AmpModel:
    """Marker base of the dynamic subclasses."""

    _amp_policy: ModelPolicy | None = None

    def __init_subclass__(cls, _amp: bool = False, **kwargs: Any) -> None:
        """Dynamic subclasses are nobody's business: registries of the user's class do not hear of them."""
        if not _amp:
            super().__init_subclass__(**kwargs)


class InstanceForward:
    """Stands where an instance has a ``forward`` of its own (``self.forward = self.impl``, a user's patch)."""

    def __init__(self, model: torch.nn.Module, inner: Any) -> None:
        self.model, self.inner = model, inner
        functools.update_wrapper(self, inner, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The instance's forward, under the model's policy."""
        policy: ModelPolicy | None = getattr(self.model, "_amp_policy", None)
        if policy is None:
            return self.inner(*args, **kwargs)
        return policy.run(self.model, self.inner, args, kwargs)


def attach(model: torch.nn.Module, policy: ModelPolicy) -> None:
    """Make ``model`` run under ``policy``; a model that has one already gets the new one."""
    if not isinstance(model, AmpModel):
        model.__class__ = amp_class(type(model))
    object.__setattr__(model, "_amp_policy", policy)
    own = model.__dict__.get("forward")
    if own is not None and not isinstance(own, InstanceForward):
        object.__setattr__(model, "forward", InstanceForward(model, own))
    stray_weights.forget(model)
    half_average.watch(model)
    live_models().add(model)


def detach(model: torch.nn.Module) -> None:
    """Undo :func:`attach`: ``model`` is a plain module of its own class again."""
    if isinstance(model, AmpModel):
        own = model.__dict__.get("forward")
        if isinstance(own, InstanceForward):
            object.__setattr__(model, "forward", own.inner)
        model.__dict__.pop("_amp_policy", None)
        model.__class__ = plain_class(type(model))
    for module in model.modules():
        module.__dict__.pop("_amp_watch", None)
    live_models().discard(model)


def remember(model: torch.nn.Module) -> tuple[torch.nn.Module, ModelPolicy | None]:
    """What :func:`put_back` needs."""
    return model, model.__dict__.get("_amp_policy")


def put_back(before: tuple[torch.nn.Module, ModelPolicy | None]) -> None:
    """Restore what :func:`remember` saw."""
    model, policy = before
    if policy is None:
        detach(model)
    else:
        attach(model, policy)


def plain_class(cls: type) -> Any:
    """The user's class behind a dynamic subclass."""
    return cls.__mro__[2] if issubclass(cls, AmpModel) else cls


def amp_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The dynamic subclass of ``cls``, made once per class."""
    classes: dict[type, type[torch.nn.Module]] = state.room("amp classes", dict)
    if cls not in classes:
        classes[cls] = _make_class(cls)
    return classes[cls]


def _make_class(cls: Any) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        policy = self._amp_policy
        bound = functools.partial(cls.forward, self)
        if policy is None or isinstance(self.__dict__.get("forward"), InstanceForward):
            return bound(*args, **kwargs)
        return policy.run(self, bound, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        build, args, *rest = reduced
        args = tuple(cls if arg is made else arg for arg in args)
        return (rebuild, (cls, build, args), *rest)

    def _replicate_for_data_parallel(self: Any) -> Any:
        if self._amp_policy is not None and self._amp_policy.master_weights:
            reconcile_model(self)  # here and not in the replicas, which run in threads
        replica = super(made, self)._replicate_for_data_parallel()
        if self._amp_policy is not None:
            replica.__dict__["_amp_stamp"] = self._amp_policy.stamp(self)
        return replica

    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
    }
    # Past the user's metaclass, which may count or rename classes; what it set on the class is inherited. An abstract
    # class keeps caches of its own, which only ABCMeta makes.
    base = abc.ABCMeta if isinstance(cls, abc.ABCMeta) else type
    made: Any = base.__new__(type(cls), cls.__name__, (AmpModel, cls), body, _amp=True)
    return made


def rebuild(cls: type[torch.nn.Module], build: Any, args: tuple[Any, ...]) -> torch.nn.Module:
    """Make an empty copy of a model under amp (deepcopy, unpickling); its state, the policy included, follows."""
    model: torch.nn.Module = build(*args)
    if not isinstance(model, AmpModel):
        model.__class__ = amp_class(type(model))
    return model
