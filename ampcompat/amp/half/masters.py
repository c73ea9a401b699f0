"""Float32 masters of half tensors, and the invariant that ties the two: ``half == value.to(half.dtype)``, bitwise.

A master belongs to the model's tensor. Its module holds it (:class:`ampcompat.amp.half.record.HalfWeights`), so that
deepcopy and pickle take it along; either tensor leads to it (:func:`master_of`); optimizers borrow its float32 copy.
The life of a master, as a table of what each event does to its two copies:

===================================  =============================  =======================================
event                                half (the model's tensor)      value (the float32 master)
===================================  =============================  =======================================
``initialize``                       rounded from float32           the float32 weight, to the bit
``optimizer.step``                   rounded from value             stepped by the optimizer
``load_state_dict``                  rounded from what was loaded   what was loaded
half written, its version moves      kept                           takes the elements that differ
half written through ``data``        kept                           takes the elements that differ
half written, and written back       kept                           kept
value written                        rounded from value             kept
both written, with no look between   kept                           takes the elements that differ
parameter replaced in its module     stays, of no model; a warning  stays with its optimizer
replaced, and added to an optimizer  stays, of no model             stays; the new one has its own
buffer assigned in its module        the new buffer, as it is       made anew from it, at the next save
``model.to(device)``                 moved                          follows
other strides (``memory_format=``)   laid out anew                  keeps its strides, for fused optimizers
``model.float()`` and the like       cast back                      takes the elements that differ
deepcopy, pickle                     copied                         copied
``initialize`` at another level      float32 again, from value      dropped
===================================  =============================  =======================================

"Elements that differ" are those where ``value`` does not round to what ``half`` holds: every element that no other code
wrote keeps its low bits.

Which copy was written is known, not guessed. Writes in place move a tensor's version counter, and ``half.to(...)`` its
address. Writes through ``param.data`` move neither, so that taking ``data`` is noted: of a parameter with a master, its
``data`` is taken through :func:`_note_taken`. An alias stays noted as long as it is alive. A copy that was neither
counted nor noted is not looked at, and nothing here reads the device.

A forward needs half weights that follow their masters (:func:`push_written`); it computes with half weights that a
script has written as they are. Masters follow these before a step, a save or a copy (:func:`sync_written`): a weight
that was written for a forward and written back by then has kept every bit of its master.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp.half.merging import merge_, merged


class Copy(Enum):
    """Name the two copies of a weight."""

    HALF = "the model's tensor"
    VALUE = "the float32 master"


class Master:
    """One half tensor of a model and its float32 master.

    Args:
        half: The model's tensor.
        value: The float32 ``Parameter`` that becomes the master; a copy of ``half`` if None.

    Attributes:
        half: The model's parameter or buffer; ``initialize`` gave it its ``dtype``.
        value: The master: a float32 ``Parameter`` of the same shape and device.
        slots: Where ``half`` is: dicts of parameters or buffers, and its name in each (several for tied weights).

    What tells which copy was written since both were equal:

    Attributes:
        half_version: Version of ``half`` at that time.
        value_version: Version of ``value`` then.
        address: Address of ``half`` then.
        taken: The copy whose ``data`` was taken last, and may have been written through it; None if neither was.
        aliases: What was taken, as far as it is alive.

    What tells whether a script has cleared a half gradient:

    Attributes:
        grad_shown: Whether ``half.grad`` was there when ``value.grad`` was made: cleared there, it is cleared here.
    """

    def __init__(self, half: torch.Tensor, value: torch.Tensor | None = None) -> None:
        if half.is_inference():  # that of a copy made under inference_mode, say
            _torch.leave_inference_mode(half)
        self.half = half
        self.dtype = half.dtype
        if value is None:
            value = torch.nn.Parameter(half.detach().float(), requires_grad=half.requires_grad)
        _torch.leave_inference_mode(value)
        self.value = value
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.grad_shown = False
        self.taken: Copy | None = None
        self.aliases: list[tuple[Copy, weakref.ref[torch.Tensor]]] = []
        self.note_equal()
        self.register()

    @property
    def is_param(self) -> bool:
        """Whether ``half`` is a parameter, and not a buffer."""
        return isinstance(self.half, torch.nn.Parameter)

    def register(self) -> None:
        """Index this master under both of its tensors."""
        index = state.masters
        index.by_tensor[id(self.half)] = index.by_tensor[id(self.value)] = self

    def add_slot(self, module: torch.nn.Module, name: str) -> None:
        """Record that ``module.name`` is ``half``."""
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
        """Record that both copies are equal now."""
        self.half_version = self.half._version
        self.value_version = self.value._version
        self.address = self.half.data_ptr()
        self.aliases = _alive(self.aliases)
        held = [copy_taken for copy_taken, _ in self.aliases]
        if Copy.HALF in held or not self.is_param:  # batch norm writes its buffers unseen: each sync compares them
            self.taken = Copy.HALF
        elif held:
            self.taken = Copy.VALUE
        else:
            self.taken = None

    @property
    def half_has_moved(self) -> bool:
        """Whether ``half`` has another version or address than when both copies were equal."""
        return self.half._version != self.half_version or self.half.data_ptr() != self.address

    @property
    def value_has_moved(self) -> bool:
        """Whether ``value`` has another version than when both copies were equal."""
        return self.value._version != self.value_version

    def written_copy(self) -> Copy | None:
        """Return the copy that other code has written, or may have; None if it has written neither.

        A version that moved is surer than ``data`` that was taken. Where both have moved, with no look between, the
        model's elements count.
        """
        if self.half_has_moved:
            return Copy.HALF
        if self.value_has_moved:
            return Copy.VALUE
        return self.taken

    def note_taken(self, tensor: torch.Tensor, alias: torch.Tensor | None) -> None:
        """Note that ``alias``, the ``data`` of ``tensor``, was taken: the copy may be written through it.

        What was written to the other copy is taken over first, so that the later write is the one that counts. Buffers
        count as written through the model's copy at any time (:meth:`note_equal`).
        """
        if not self.is_param:
            return
        taken = Copy.HALF if tensor is self.half else Copy.VALUE
        if self.written_copy() not in (None, taken):
            sync_written([self])
        self.taken = taken
        self.aliases = _alive(self.aliases)
        if alias is not None:
            self.aliases.append((taken, weakref.ref(alias)))

    def export(self) -> torch.Tensor:
        """Return the master for a state dict: what is written into it, ``.data`` too, counts."""
        alias = self.value.detach()
        if self.is_param:
            self.aliases.append((Copy.VALUE, weakref.ref(alias)))
        self.note_equal()  # after ``sync_written``
        return alias

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
            f"A weight that amp.initialize had cast to {self.dtype} was {self.half.dtype} - at O2 the dtype of the"
            " model is managed by amp, so the weight is cast back - take amp.unwrap(model) for a float32 copy, or"
            " initialize again at another opt_level.",
        )
        exact = self.half.detach()
        _recast(self.half, self.dtype)
        self.value.copy_(merged(self.value, exact, self.dtype))
        self.half.copy_(self.value)
        self.note_equal()

    @torch.no_grad()
    def push(self) -> None:
        """Write the master into the model."""
        self.half.copy_(self.value)
        self.note_equal()

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
        sync_written([self])
        # Both copies go through the memo, so that an optimizer which is copied along holds the copy's masters.
        half = copy.deepcopy(self.half, memo)
        value = copy.deepcopy(self.value, memo)
        if not _torch.has_storage(half):
            return self  # a compiler's stand-in for the module, which is never stepped
        clone = memo[id(self)] = Master(half, value)  # its slots are found by ``masters_of``
        clone.push()  # ``half`` may have been copied with its module, before it followed ``value``
        self.note_equal()  # to copy ``value``, torch took its ``data``
        return clone

    def __reduce__(self) -> Any:
        sync_written([self])
        return _rebuilt, (self.half, self.value)


def _rebuilt(half: torch.Tensor, value: torch.Tensor) -> Master:
    """Unpickle a master, perhaps in a process without ``initialize``."""
    watch_torch()
    return Master(half, value)


def watch_torch() -> None:
    """Follow ``param.data`` that is taken, until a reset."""
    state.patch_once(_torch.watch_parameter_data, _note_taken)


def _note_taken(param: torch.Tensor, alias: torch.Tensor | None) -> None:
    """Have the master of ``param``, if it has one, know that its ``data`` was taken."""
    master = master_of(param)
    if master is not None:
        master.note_taken(param, alias)


def _alive(
    aliases: list[tuple[Copy, weakref.ref[torch.Tensor]]],
) -> list[tuple[Copy, weakref.ref[torch.Tensor]]]:
    """Those of ``aliases`` that something still holds, be it a view of them."""
    if not aliases:
        return aliases
    return [(taken, alias) for taken, alias in aliases if _torch.tensor_of(alias) is not None]


def _recast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast ``tensor`` in place, and its gradient."""
    grad = tensor.grad
    tensor.grad = None  # torch refuses a gradient of another dtype than the tensor's
    _torch.set_data(tensor, tensor.detach().to(dtype))
    if grad is not None:
        tensor.grad = grad.to(dtype)


# -- find --------------------------------------------------------------------------------------------------------------
def master_of(tensor: torch.Tensor) -> Master | None:
    """The master whose half or float32 copy is ``tensor``, if there is one."""
    master = state.masters.by_tensor.get(id(tensor))
    if master is None:
        return None
    if master.value is not tensor and master.half is not tensor:  # a new tensor with the id of one that is gone
        return None
    return master


# -- keep both copies equal --------------------------------------------------------------------------------------------
def push_written(masters: Iterable[Master]) -> None:
    """Have half weights follow what was written to their masters, before a forward. No host sync."""
    written = _written(masters)
    if written:
        _torch.run_untraced(_bring_up_to_date, written, False)


def sync_written(masters: Iterable[Master]) -> None:
    """Have each copy follow what was written to the other, before a step, a save or a copy. No host sync."""
    written = _written(masters)
    if written:
        _torch.run_untraced(_bring_up_to_date, written, True)


def _written(masters: Iterable[Master]) -> list[Master]:
    """Those of ``masters`` of which either copy may have been written."""
    # Inline, as one condition: models have thousands of masters, and nearly always none of them was written.
    return [
        m
        for m in masters
        if m.taken is not None
        or (half := m.half)._version != m.half_version
        or m.value._version != m.value_version
        or half.data_ptr() != m.address
    ]


def _bring_up_to_date(masters: list[Master], takes_in_half: bool) -> None:
    """Write ``masters`` that were written into the model; with ``takes_in_half``, half weights into masters as well."""
    tensors_are_stand_ins = torch.compiler.is_compiling() or _torch.in_fake_mode()
    if tensors_are_stand_ins:
        return
    for master in masters:
        master.follow_module()
    by_half = [master for master in masters if master.written_copy() is Copy.HALF]
    by_value = [master for master in masters if master.written_copy() is Copy.VALUE]
    if takes_in_half:
        pull_all(by_half)
    _round_into_model(by_value)


def pull_all(masters: Sequence[Master]) -> None:
    """Take what was written to half weights into their masters; elements that were not keep their low bits."""
    merge_([master.value for master in masters], [master.half for master in masters])
    for master in masters:
        master.note_equal()


@_torch.without_grad
def _round_into_model(masters: list[Master]) -> None:
    """Write masters that other code has written, or may have, into the model.

    Half weights get another version where their master has: a graph that holds them is not valid any more. Where the
    master's ``data`` was only taken, it may not have been written at all, and graphs stay valid.
    """
    if not masters:
        return
    halves = [m.half.detach() if m.value_has_moved else _torch.data_of(m.half) for m in masters]
    _torch.foreach_copy_(halves, [m.value for m in masters])
    for master in masters:
        master.note_equal()


@_torch.without_grad
def push_all(masters: list[Master]) -> None:
    """Write masters that an optimizer stepped into the model, in fused passes."""
    if not masters:
        return
    _torch.foreach_copy_([m.half for m in masters], [m.value for m in masters])
    for master in masters:
        if master.taken is None:
            master.half_version = master.half._version
            master.value_version = master.value._version
        else:
            master.note_equal()


def sync_all(masters: Sequence[Master]) -> int:
    """Make both copies of each of ``masters`` equal, those included of which nothing tells that they were written.

    Returns:
        How many parameters were not equal to their masters. One host sync.
    """
    for master in masters:
        master.follow_module()
    differ = [_differs(master) for master in masters if master.is_param]
    by_value = [master for master in masters if master.written_copy() is Copy.VALUE]
    pull_all([master for master in masters if master.written_copy() is not Copy.VALUE])
    _round_into_model(by_value)
    if not differ:
        return 0
    return int(torch.stack([flag.to(differ[0].device) for flag in differ]).sum().item())


def _differs(master: Master) -> torch.Tensor:
    """Whether ``half`` is not ``value`` as it rounds, bit for bit: a 0-dim flag."""
    rounded = master.value.detach().to(master.dtype)
    return (_torch.bits(rounded) != _torch.bits(master.half.detach())).any()
