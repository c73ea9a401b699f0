"""Run a forward again, and its backward, under the probe.

A batch that spoils the weights is lost once, and everything after it: no later step shows why. Where the forward is not
what it was, or gives another result, nothing is concluded. The run that is observed stays bitwise what it was.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ampcompat.tools.core import Args, Kwargs, is_replica, map_tree, observers, tensors_in
from ampcompat.tools.explain.birth import Birth
from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import Probe
from ampcompat.tools.frames import script_line
from ampcompat.tools.generators import random_state, set_random_state
from ampcompat.tools.tensors import is_finite, largest, readable

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3
#: Lost steps whose forwards are run again.
MOST_RUN_AGAIN = 100
#: How far a result may be from the same one, computed in half in another order, of the largest.
ROUNDING = 0.01
ANOTHER = "its forward could not be run again as it was"
#: Objects whose attributes are not the model's, or never change.
_NOT_OF_MODEL = (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)


class Forward:
    """What running one forward of an initialized model again takes."""

    def __init__(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.model = weakref.ref(model)
        self.args, self.kwargs = args, kwargs
        self.age = 0  # steps that have ended since it began
        self.random = random_state(_cuda_devices(model))
        self.called_at = script_line(sys._getframe(1))
        self.grads: list[torch.Tensor | None] = []  # of those outputs that want one, as the backward brought them
        self._versions = self._versions_now(model)
        self._outputs: list[tuple[torch.Tensor, int]] = []  # what it has returned, with the versions

    def end(self, output: object) -> None:
        """Note what it has returned, and the gradients of that when they come."""
        outputs = tensors_in(output)
        self._outputs = [(tensor.detach(), tensor._version) for tensor in outputs if not tensor.is_inference()]
        wanting = [tensor for tensor in outputs if tensor.requires_grad]
        self.grads = [None] * len(wanting)
        for index, tensor in enumerate(wanting):

            def note(grad: torch.Tensor, index: int = index) -> None:
                self.grads[index] = grad

            tensor.register_hook(note)  # type: ignore[no-untyped-call]

    @property
    def has_grads(self) -> bool:
        """Whether a backward has come to it."""
        return any(grad is not None for grad in self.grads)

    @property
    def is_lost(self) -> bool:
        """Whether it has returned what is not finite. A host sync an output."""
        return not all(is_finite(tensor) for tensor, _ in self._outputs)

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has written its inputs, or its model's weights, since; and one process can run it."""
        model = self.model()
        return model is not None and self._versions_now(model) == self._versions and _runs_alone(model)

    def _versions_now(self, model: torch.nn.Module) -> list[int]:
        """Numbers that change when anything writes what it reads. Runs no op."""
        given = [tensor for tensor in tensors_in((self.args, self.kwargs)) if not tensor.is_inference()]
        return [tensor._version for tensor in (*given, *model.parameters())]

    def has_returned(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether ``outputs``, of running it again, are its own. A host sync an output."""
        again = [tensor.detach() for tensor in outputs if not tensor.is_inference()]
        return len(again) == len(self._outputs) and all(
            tensor._version != version or _is_same(tensor, one)
            for (tensor, version), one in zip(self._outputs, again, strict=True)
        )


class Finding(NamedTuple):
    """What running a forward again has shown.

    Attributes:
        birth: Where what is not finite was born; None where nothing was found.
        known: In words, what is known then.
    """

    birth: Birth | None
    known: str = ""


def run_again(forward: Forward, backward: bool) -> Finding:
    """Find the birth of what is not finite in the outputs of ``forward``, or with ``backward`` in its gradients."""
    model = forward.model()
    if model is None:
        return Finding(None, ANOTHER)
    leaves: list[torch.Tensor] = []
    places = Places([model], model, sys._getframe(), forward.called_at)
    probe = Probe(places)
    with _aside(model, forward), torch.enable_grad(), places:
        args = tuple(_copied(value, leaves) for value in forward.args)
        kwargs = {name: _copied(value, leaves) for name, value in forward.kwargs.items()}
        probe.given_to(model, args, kwargs)
        with probe:
            outputs = tensors_in(model.forward(*args, **kwargs))
        if not forward.has_returned(outputs):
            return Finding(None, ANOTHER)
        birth = probe.birth_of(outputs)
        if not backward:
            most = max(map(largest, outputs), default=0.0)
            return Finding(birth, f"its forward, run again, returned values up to {most:.3g}")
        wanting = [output for output in outputs if output.requires_grad]
        pairs = [(output, grad) for output, grad in zip(wanting, forward.grads, strict=False) if grad is not None]
        if not all(is_finite(grad) for _, grad in pairs):
            return Finding(birth, "the gradient that came into the model was not finite")
        wanted = [*leaves, *(param for param in model.parameters() if param.requires_grad)]
        if pairs and wanted:
            returned, received = zip(*pairs, strict=True)
            for grad in received:
                probe.made.note_scaled(grad)
            with probe:
                grads = torch.autograd.grad(returned, wanted, received, allow_unused=True)
            birth = probe.birth_of(grad for grad in grads if grad is not None) or birth
        return Finding(birth, "no op of its forward and backward, run again, made it")


class Forwards:
    """The forwards of initialized models since the last step, kept to be run again."""

    def __init__(self) -> None:
        self.kept: deque[Forward] = deque(maxlen=MOST_FORWARDS)  # the latest last
        self._left_to_run_again = MOST_RUN_AGAIN
        self._running: list[Forward | None] = []  # that have begun; None for those that are not kept

    def begin(self, model: torch.nn.Module, args: Args, kwargs: Kwargs, is_watched: bool) -> None:
        """Keep references to what a forward gets, if it may have to be run again."""
        is_kept = torch.is_grad_enabled() and not is_replica(model) and not is_watched and self._left_to_run_again > 0
        self._running.append(Forward(model, args, kwargs) if is_kept else None)

    def end(self, output: object) -> None:
        """Note what it has returned."""
        forward = self._running.pop() if self._running else None
        if forward is not None:
            forward.end(output)
            self.kept.append(forward)

    def leave(self) -> None:
        """Note that no forward runs: an exception has left it."""
        self._running.clear()

    def after_step(self) -> None:
        """Forget forwards that a backward has followed, and old ones."""
        for forward in self.kept:
            forward.age += 1
        kept = [forward for forward in self.kept if not forward.has_grads and forward.age < OLDEST]
        self.kept = deque(kept, MOST_FORWARDS)

    def find(self, of_backward: bool, is_nan: bool) -> Finding:
        """Find the birth of a loss, or of gradients, that is not finite, by running forwards again.

        Args:
            of_backward: Whether it is of gradients.
            is_nan: Whether it is a loss that is NaN, which a mask of -inf alone does not make.
        """
        if self._left_to_run_again <= 0:
            return Finding(None, f"forwards of {MOST_RUN_AGAIN} lost steps were run again, and no more are")
        self._left_to_run_again -= 1
        latest = Finding(None, ANOTHER)
        try:
            for forward in self.kept:
                if not forward.is_as_it_was or (of_backward and not forward.has_grads):
                    continue
                latest = run_again(forward, of_backward)
                if latest.birth is not None and not (is_nan and latest.birth.is_mask):
                    return latest
        except Exception as error:  # the run that is observed must go on whatever happens here
            return Finding(None, f"its forward could not be run again: {type(error).__name__}: {error}")
        return latest._replace(birth=None)

    def find_in_latest(self) -> Birth | None:
        """Find the birth of what the latest forward has returned and is not finite; None where it is, or a mask's."""
        latest = self.kept[-1] if self.kept else None
        if latest is None or not latest.is_lost or not latest.is_as_it_was:
            return None
        with contextlib.suppress(Exception):  # the run has ended, and that well
            birth = run_again(latest, backward=False).birth
            return None if birth is not None and birth.is_mask else birth
        return None


# -- the run stays what it was -----------------------------------------------------------------------------------------
@contextlib.contextmanager
def _aside(model: torch.nn.Module, forward: Forward) -> Iterator[None]:
    """Inside: unobserved, with the random numbers of ``forward``. Afterwards all is as it was, bitwise."""
    outside = random_state([device for device, _ in forward.random.cuda])
    watching = observers()[:]
    with _attributes_kept(model):
        observers().clear()
        set_random_state(forward.random)
        try:
            yield
        finally:
            set_random_state(outside)
            observers()[:] = watching


@contextlib.contextmanager
def _attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Inside, a forward may write what modules hold (buffers, counters, lists), and the objects that they hold."""
    of_modules = [vars(module) for module in model.modules()]
    of_objects = [
        vars(value)
        for attributes in of_modules
        for value in attributes.values()
        if hasattr(value, "__dict__") and not isinstance(value, _NOT_OF_MODEL)
    ]
    before = [(attributes, dict(attributes)) for attributes in (*of_modules, *of_objects)]
    try:
        for attributes, values in before:
            for name, value in values.items():
                if name != "_parameters":
                    attributes[name] = _copy_of_held(value)
        yield
    finally:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)


def _copy_of_held(value: Any) -> Any:
    """A copy of a tensor, or of a container and what is in it; anything else is handed over itself."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.clone()
    if type(value) in (set, deque):
        return copy.copy(value)
    if type(value) is list:
        return list(map(_copy_of_held, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copy_of_held(one)) for key, one in value.items())
    return value


def _copied(value: object, leaves: list[torch.Tensor]) -> object:
    """A copy of one argument, which the forward may write into; what wants gradients in it is added to ``leaves``.

    Raises:
        AttributeError: It is, or holds, an object that moves itself (``.to``) and has no ``clone``.
    """

    def copied(leaf: Any) -> object:
        if not isinstance(leaf, torch.Tensor):
            with torch.no_grad():
                return leaf.clone()
        clone = leaf.detach().clone()
        if not leaf.requires_grad:
            return clone
        leaves.append(clone.requires_grad_())
        return clone.view_as(clone)  # what wants gradients must not be written in place as a leaf; the run's was none

    mapped = map_tree(value, copied)
    if mapped is value and isinstance(value, (list, dict, set)):
        return copy.copy(value)
    return mapped


def _is_same(tensor: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether ``again`` is ``tensor``, up to what another order of sums makes."""
    if tensor.shape != again.shape or tensor.dtype != again.dtype:
        return False
    if not readable(tensor):
        return tensor.layout != torch.strided or tensor.device.type == "meta" or torch.equal(tensor, again)
    is_finite_there = torch.isfinite(tensor)
    if not torch.equal(is_finite_there, torch.isfinite(again)):
        return False
    values = tensor[is_finite_there].double()
    return torch.allclose(again[is_finite_there].double(), values, rtol=0.0, atol=ROUNDING * largest(values))


def _cuda_devices(model: torch.nn.Module) -> list[torch.device]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return list({param.device for param in model.parameters() if param.device.type == "cuda"})


def _runs_alone(model: torch.nn.Module) -> bool:
    """Whether one process can run ``model``: synchronised batch norms wait for the others."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (distributed and any(isinstance(one, torch.nn.SyncBatchNorm) for one in model.modules()))
