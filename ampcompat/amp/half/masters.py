"""Float32 masters of half tensors, and the invariant that ties the two: ``half == value.to(half.dtype)``, bitwise.

A master belongs to the model's tensor. Its module holds it (:class:`ampcompat.amp.half.record.HalfWeights`), so that
deepcopy and pickle take it along; either tensor leads to it (:func:`master_of`); optimizers borrow its float32 copy.
The life of a master, as a table of what each event does to its two copies:

==========================================  =============================  =======================================
event                                       half (the model's tensor)      value (the float32 master)
==========================================  =============================  =======================================
``initialize``                              rounded from float32           the float32 weight, to the bit
``optimizer.step``                          rounded from value             stepped by the optimizer
``load_state_dict``                         rounded from what was loaded   what was loaded
half written, its version moves             kept                           takes the elements that differ
half written through ``data``               kept                           takes the elements that differ
half written through an older alias         kept until the next step       at ``amp.sync_masters`` alone
half written, and written back              kept                           kept
value written                               rounded from value             kept
both written in place                       kept                           takes the elements that differ
half through ``data``, then value in place  rounded from value             kept
parameter replaced in its module            stays, of no model; a warning  stays with its optimizer
replaced, and added to an optimizer         stays, of no model             stays; the new one has its own
buffer assigned in its module               the new buffer, as it is       made anew from it, at the next save
``model.to(device)``                        moved                          follows
other strides (``memory_format=``)          laid out anew                  keeps its strides, for fused optimizers
``model.float()`` and the like              cast back                      takes the elements that differ
deepcopy, pickle                            copied                         copied
``initialize`` at another level             float32 again, from value      dropped
==========================================  =============================  =======================================

An element differs where ``value`` does not round to what ``half`` holds: every element that no other code wrote keeps
its low bits.

To *push* is to round a master into its half weight, to *pull* is to take what was written to a half weight into its
master, to *align* is to do whichever is due (:mod:`ampcompat.amp.half.written`). A forward only pushes
(:func:`push_written`): half weights that a script wrote are used unchanged. A step, a save or a copy aligns
(:func:`align_written`): a weight that was written for a forward and written back before that keeps every bit of its
master.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp.half.merging import merge_, merged
from ampcompat.amp.half.written import Due, due


class Master:
    """One half tensor of a model and its float32 master.

    Args:
        half: The model's tensor.
        value: The float32 ``Parameter`` that becomes the master; a copy of ``half`` if None.

    Attributes:
        half: The model's parameter or buffer; ``initialize`` gave it its ``dtype``.
        value: The master: a float32 ``Parameter`` of the same shape and device.
        is_param: Whether ``half`` is a parameter, and not a buffer.
        slots: Where ``half`` is: dicts of parameters or buffers, and its name in each (several for tied weights).

    What tells which copy was written since both were equal:

    Attributes:
        half_version: Version of ``half`` at that time.
        value_version: Version of ``value`` then.
        address: Address of ``half`` then.
        value_taken: Whether ``value.data`` was taken since then, or ``value`` was handed out in a state dict.
        half_taken: Whether ``half.data`` was taken since the last push. A pull keeps the flag: in
            ``p.data.copy_(model.state_dict()[name])``, ``data`` is taken, then the save pulls, and only then ``p`` is
            written. Always True for a buffer: batch norm writes its buffers unseen, so each alignment compares them.

    What tells whether a script has cleared a half gradient:

    Attributes:
        grad_shown: Whether ``half.grad`` stands for ``value.grad``, so that a None there clears it here.
    """

    def __init__(self, half: torch.Tensor, value: torch.Tensor | None = None) -> None:
        if half.is_inference():  # the model was copied under inference_mode, say
            _torch.leave_inference_mode(half)
        self.half = half
        self.is_param = isinstance(half, torch.nn.Parameter)
        self.dtype = half.dtype
        if value is None:
            value = torch.nn.Parameter(half.detach().float(), requires_grad=half.requires_grad)
        _torch.leave_inference_mode(value)
        self.value = value
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.grad_shown = False
        self.note_untouched()
        self.register()

    def register(self) -> None:
        """Index this master under both of its tensors."""
        index = state.masters
        index.by_tensor[id(self.half)] = index.by_tensor[id(self.value)] = self

    def add_slot(self, module: torch.nn.Module, name: str) -> None:
        """Note that ``module.name`` is ``half``."""
        tensors: Any = module._parameters if name in module._parameters else module._buffers
        if not any(known is tensors and known_name == name for known, known_name in self.slots):
            self.slots.append((tensors, name))

    def retire(self) -> None:
        """Leave ``half``, which is float32 again, without a master; optimizers may still hold ``value``."""
        state.masters.by_tensor.pop(id(self.half), None)

    def drop_gradient(self) -> None:
        """Forget what blocks have left in ``value.grad``."""
        self.grad_shown = False
        self.value.grad = None

    # -- which copy was written ----------------------------------------------------------------------------------------
    def note_equal(self) -> None:
        """Note that both copies are equal now."""
        self.half_version = self.half._version
        self.value_version = self.value._version
        self.address = self.half.data_ptr()
        self.value_taken = False

    def note_untouched(self) -> None:
        """Note that both copies are equal now, and that nothing that happened before counts as written."""
        self.note_equal()
        self.half_taken = not self.is_param

    @property
    def half_has_moved(self) -> bool:
        """Whether ``half`` has another version or address than when both copies were equal."""
        return self.half._version != self.half_version or self.half.data_ptr() != self.address

    @property
    def value_has_moved(self) -> bool:
        """Whether ``value`` has another version than when both copies were equal."""
        return self.value._version != self.value_version

    @property
    def due(self) -> Due:
        """What makes both copies equal again."""
        return due(
            half_moved=self.half_has_moved,
            value_moved=self.value_has_moved,
            half_taken=self.half_taken,
            value_taken=self.value_taken,
        )

    def note_taken(self, tensor: torch.Tensor) -> None:
        """Note that the ``data`` of ``tensor``, one of both copies, is taken: it may be written through it.

        The other copy, if it was written, is aligned first, so that the later write is the one that counts.
        """
        if not self.is_param:
            return
        if tensor is self.half:
            if self.due is Due.PUSH:
                align_written([self])
            self.half_taken = True
        else:
            if self.due is Due.PULL:
                align_written([self])
                self.half_taken = False  # unlike after other pulls: what comes through the master's ``data`` counts
            self.value_taken = True

    # -- what the module did to its tensor -----------------------------------------------------------------------------
    def follow_module(self) -> None:
        """Follow ``half`` to another device, and cast it back where ``module.float()`` or the like has cast it."""
        if self.value.device != self.half.device:
            self._follow_device()
        if self.half.dtype != self.dtype:
            self._keep_dtype()

    def _follow_device(self) -> None:
        """Move the master after ``module.to(device)``; it keeps its identity, for the optimizer that holds it."""
        warn_once(
            "master device",
            f"The model moved from {self.value.device} to {self.half.device} after amp.initialize - its master weights"
            " follow, but optimizer state does not - move the model before amp.initialize (D15).",
        )
        _torch.set_data(self.value, self.value.detach().to(self.half.device))
        if self.value.grad is not None:
            self.value.grad = self.value.grad.to(self.half.device)

    @torch.no_grad()
    def _keep_dtype(self) -> None:
        """Undo ``model.float()``: at O2 amp decides about the dtype of the model."""
        warn_once(
            "master dtype",
            f"A weight that amp.initialize had cast to {self.dtype} was {self.half.dtype} - at O2 and O5 the dtype"
            " of the model is managed by amp, so the weight is cast back - take amp.unwrap(model) for a float32 copy,"
            " or initialize again at another opt_level.",
        )
        exact = self.half.detach()
        _recast(self.half, self.dtype)
        self.value.copy_(merged(self.value, exact, self.dtype))
        self.push()

    def push(self) -> None:
        """Round the master into its half weight, whatever that holds."""
        push_all([self])
        self.note_untouched()

    def rebind(self, half: torch.Tensor) -> None:
        """Make ``half``, which has taken the place of the model's tensor, the half copy under every name."""
        self.half = half
        self.grad_shown = False
        self.register()
        for tensors, name in self.slots:
            if tensors.get(name) is not None:
                tensors[name] = half

    # -- copies --------------------------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> Master:
        align_written([self])
        # Both copies go through the memo, so that an optimizer which is copied along holds the copy's masters.
        half = copy.deepcopy(self.half, memo)
        value = copy.deepcopy(self.value, memo)
        if not _torch.has_storage(half):
            return self  # a compiler's stand-in for the module, which is never stepped
        clone = memo[id(self)] = Master(half, value)  # its slots are found by ``masters_of``
        _watch_steps()
        clone.push()  # ``half`` may have been copied with its module, before it followed ``value``
        self.note_untouched()  # torch took both ``data`` to copy them; a script's alias from before is not seen
        return clone

    def __reduce__(self) -> Any:
        align_written([self])
        return _rebuilt, (self.half, self.value)


def _rebuilt(half: torch.Tensor, value: torch.Tensor) -> Master:
    """Unpickle a master, perhaps in a process without ``initialize``."""
    watch_torch()
    _watch_steps()
    return Master(half, value)


def _watch_steps() -> None:
    """Look at the steps of optimizers that were copied or loaded together with a model, until a reset."""
    state.patch_once(_torch.call_before_steps, _refuse_step_without_gradients)


def _refuse_step_without_gradients(optimizer: Any) -> None:
    """Refuse the step of an ``optimizer`` that has masters, is not under amp, and so would train nothing."""
    if torch.compiler.is_compiling() or "_amp_stash" in vars(optimizer):
        return
    masters: set[Master] = set()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        master = master_of(param)
        if master is not None and master.value is param:
            masters.add(master)
    for known in state.optimizers.listed():  # it may be inside one that amp steps
        masters.difference_update(known._amp_stash.leaves.masters)
    have_gradients = any(master.value.grad is not None for master in masters)
    if not have_gradients and any(master.half.grad is not None for master in masters):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() with masters that have no gradients - this optimizer was copied or"
            " loaded with its model, and is not under amp: it holds float32 masters, and the half weights of the model"
            " get the gradients - call amp.initialize(model, optimizer, opt_level=...) with both, at the level that"
            " they were at, and give each loss a scale_loss block."
        )


def watch_torch() -> None:
    """Note ``param.data`` that is taken, until a reset."""
    state.patch_once(_torch.watch_parameter_data, _note_taken)


def _note_taken(param: torch.Tensor) -> None:
    """Note at the master of ``param``, if it has one, that ``param.data`` is taken."""
    master = master_of(param)
    if master is not None:
        master.note_taken(param)


def _recast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast ``tensor`` in place, and its gradient."""
    grad = tensor.grad
    tensor.grad = None  # torch refuses a gradient of another dtype than the tensor's
    _torch.set_data(tensor, tensor.detach().to(dtype))
    if grad is not None:
        tensor.grad = grad.to(dtype)


# -- find --------------------------------------------------------------------------------------------------------------
def master_of(tensor: torch.Tensor) -> Master | None:
    """Return the master whose half or float32 copy is ``tensor``; None if there is none."""
    master = state.masters.by_tensor.get(id(tensor))
    if master is None:
        return None
    if master.value is not tensor and master.half is not tensor:  # a new tensor with the id of one that is gone
        return None
    return master


# -- keep both copies equal --------------------------------------------------------------------------------------------
def push_written(masters: Iterable[Master]) -> None:
    """Round masters that a script wrote into their half weights, before a forward. No host sync."""
    # As in :func:`align_written`, but for half weights whose data was only taken: a forward uses them unchanged.
    written = [
        m
        for m in masters
        if m.value_taken
        or (half := m.half)._version != m.half_version
        or m.value._version != m.value_version
        or half.data_ptr() != m.address
    ]
    if written:
        _torch.run_untraced(_bring_up_to_date, written, pulls=False)


def align_written(masters: Iterable[Master]) -> None:
    """Make both copies equal where a script wrote one of them, before a step, a save or a copy. No host sync."""
    # Inline, as one condition: models have thousands of masters, and nearly always none of them was written.
    written = [
        m
        for m in masters
        if m.half_taken
        or m.value_taken
        or (half := m.half)._version != m.half_version
        or m.value._version != m.value_version
        or half.data_ptr() != m.address
    ]
    if written:
        _torch.run_untraced(_bring_up_to_date, written, pulls=True)


def _bring_up_to_date(masters: list[Master], *, pulls: bool) -> None:
    """Push masters that a script wrote; if ``pulls``, also pull what it wrote to half weights."""
    tensors_are_stand_ins = torch.compiler.is_compiling() or _torch.in_fake_mode()
    if tensors_are_stand_ins:
        return
    for master in masters:
        master.follow_module()
    to_push = [master for master in masters if master.due is Due.PUSH]
    if pulls:
        pull_all([master for master in masters if master.due is Due.PULL])
    push_all(to_push)


def pull_all(masters: Sequence[Master]) -> None:
    """Take what was written to half weights into their masters; elements that were not keep their low bits."""
    merge_([master.value for master in masters], [master.half for master in masters])
    for master in masters:
        master.note_equal()


@_torch.without_grad
def push_all(masters: Sequence[Master]) -> None:
    """Round masters that an optimizer stepped, or a script wrote, into their half weights, in fused passes.

    As under apex, which wrote through ``data``, the half weights keep their versions: a graph that holds them can still
    go backward, as where a discriminator steps before the generator's loss, which it has judged, goes backward.
    """
    if not masters:
        return
    halves = []
    values = []
    versions = []
    for master in masters:
        halves.append(master.half)
        values.append(master.value)
        versions.append(master.half._version)
    _torch.foreach_copy_(halves, values)
    _torch.set_versions(halves, versions)
    # :meth:`Master.note_untouched` inline, for thousands of masters at each step, without what a push does not move.
    for master in masters:
        master.value_version = master.value._version
        master.half_taken = not master.is_param
        master.value_taken = False


def align_all(masters: Sequence[Master]) -> int:
    """Make both copies of each master equal, also where nothing tells that either was written.

    Returns:
        How many parameters were not equal to their masters. One host sync.
    """
    for master in masters:
        master.follow_module()
    differ = [_differs(master) for master in masters if master.is_param]
    to_push = [master for master in masters if master.due is Due.PUSH]
    pull_all([master for master in masters if master.due is not Due.PUSH])
    push_all(to_push)
    if not differ:
        return 0
    return int(torch.stack([flag.to(differ[0].device) for flag in differ]).sum().item())


def _differs(master: Master) -> torch.Tensor:
    """Whether ``half`` is not ``value`` as it rounds, bit for bit: a 0-dim flag."""
    rounded = master.value.detach().to(master.dtype)
    return (_torch.bits(rounded) != _torch.bits(master.half.detach())).any()
