"""Float32 masters of half tensors. The two copies are kept equal: ``half == value.to(half.dtype)``, bitwise.

A *master* ties two copies of one weight or buffer: ``half``, the model's tensor, and ``value``, a float32 parameter.
The module that has ``half`` also holds the master (:class:`ampcompat.amp.half.record.HalfWeights`), so deepcopy and
pickle take it along. Either copy leads to the master (:func:`master_of`). Optimizers under amp step ``value``.

The copies are equal when a step has ended and when a forward begins. Three kinds of writes to ``half`` are exceptions:
the text below the tables lists them. A float16 weight of two elements, in numbers (1.0 and 1.001 are neighbours):

=====================================  ============  =============
moment                                 half          value
=====================================  ============  =============
``initialize`` of [1.0003, 3.0]        [1.0, 3.0]    [1.0003, 3.0]
``step`` adds 0.0004 to the first      [1.001, 3.0]  [1.0007, 3.0]
the script writes ``weight[1] = 0.5``  [1.001, 0.5]  [1.0007, 3.0]
a forward                              [1.001, 0.5]  [1.0007, 3.0]
the next ``step``                      [1.001, 0.5]  [1.0007, 0.5]
=====================================  ============  =============

The first element, which the script did not write, keeps its low bits. What each event does to both copies:

=========================================  ================================  =======================================
event                                      half (the model's tensor)         value (the float32 master)
=========================================  ================================  =======================================
``initialize``                             rounded from float32              the float32 weight, to the bit
``optimizer.step``                         rounded from value                stepped by the optimizer
``load_state_dict``                        rounded from what was loaded      what was loaded
half written, also through ``data``        kept                              takes the elements that differ
half written past torch, as through numpy  kept until the next step          at ``amp.sync_masters`` alone
half written, and written back             kept                              kept
value written, also through ``data``       rounded from value                kept
both written                               kept                              takes the elements that differ
attribute set on either                    has it                            has it
``half.requires_grad`` set                 kept                              follows, at ``amp.master_params``
parameter replaced in its module           stays, of no model; a save warns  stays with its optimizer
replaced, and added to an optimizer        stays, of no model                stays; the new one has its own
buffer assigned in its module              the new buffer, as it is          a new master is made at the next save
``model.to(device)``                       moved                             follows
other strides (``memory_format=``)         laid out anew                     keeps its strides, for fused optimizers
``model.float()`` and the like             cast back                         takes the elements that differ
deepcopy, pickle                           copied                            copied
``initialize`` at another level            float32 again, from value         dropped
=========================================  ================================  =======================================

An element differs if ``value`` does not round to what ``half`` holds. An element that only amp wrote does not differ,
so it keeps its low bits.

Three words name what is done to the copies:

* *push*: round ``value`` into ``half``.
* *pull*: take the elements of ``half`` that differ into ``value``.
* *align*: push if ``value`` was written, pull if ``half`` was.

A forward only pushes (:func:`push_written`). A step, a save or a copy aligns (:func:`align_written`). So three kinds of
writes to ``half`` do not reach ``value`` at once:

* A script's write: forwards use it unchanged, and the next alignment pulls it. A weight that is changed for one forward
  and changed back before the next step leaves its master unchanged.
* Batch norm's write to a half buffer: torch does not tell of it, so every alignment pulls buffers.
* A write past torch, as through numpy: only ``amp.sync_masters`` pulls it, and a step overwrites it.

We know which copy was written without reading the device. A write moves the version of a tensor, or the version of
what its ``data`` gave out (:class:`ampcompat._torch.DataWrites`); ``half.to(...)`` moves the address of ``half``. A
master remembers all of these from the last time that both copies were equal. A copy was written if one of them has
changed since (:func:`half_written`, :func:`value_written`). To read ``data`` changes none of them.

If both copies were written, ``half`` wins. But if one copy was written and a script asks for ``data`` of the other, we
align first, so the later write wins (:meth:`Master.data_of`).

A script may save the model in one thread while another trains it. So the copies are compared and made equal under one
lock, ``copies_lock``. What a save has handed out may be written without notice: the training thread rounds it at the
next forward or step (:func:`align_for_save`).
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import Part, state


@dataclass(eq=False)
class MasterIndex(Part):
    """Index from a tensor to its master, by ``id`` of either copy, and lists of masters that are looked up often.

    Attributes:
        by_tensor: Masters by the id of their half tensor and of their float32 one. Check that the master found still
            holds that tensor: ids are reused.
        by_memory: Masters by what identifies the memory of either copy. None: rebuild on next use.
        by_model: Masters of a whole model, valid for one ``generation``.
        generation: Counts masters that were made, dropped or moved to another module.
    """

    by_tensor: weakref.WeakValueDictionary[int, Master] = field(default_factory=weakref.WeakValueDictionary)
    by_memory: dict[int, weakref.WeakSet[Master]] | None = None
    by_model: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, list[Master]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    generation: int = 0


master_index = state.add(MasterIndex())

#: Held where the two copies of masters are compared or made equal, and where masters are made: a model may be saved in
#: another thread than the one that trains it.
copies_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked worker (DataLoader) goes on without the thread that holds it
    os.register_at_fork(after_in_child=copies_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Master:
    """One half tensor of a model and its float32 master.

    Args:
        half: The model's tensor.
        value: The float32 ``Parameter`` that becomes the master; a copy of ``half`` if None.

    Attributes:
        half: The model's parameter or buffer.
        dtype: The half dtype that ``initialize`` has cast it to.
        value: The master: a float32 ``Parameter`` of the same shape and device.
        is_param: Whether ``half`` is a parameter, and not a buffer.
        slots: Where ``half`` is: dicts of parameters or buffers, and its name in each (several for tied weights).
        is_lent: Whether an optimizer under amp has been given ``value`` to step; False in a copied model.

    What tells which copy was written since both were equal:

    Attributes:
        half_version: Version of ``half`` at that time.
        value_version: Version of ``value`` then.
        address: Address of ``half`` then.
        half_data_writes: Writes through ``half.data`` since then; None until it is first asked for.
        value_data_writes: Writes through ``value.data`` since then; None until it is first asked for.
        is_exported: Whether ``state_dict()`` has given ``value`` out since then. Nothing would tell of
            ``state_dict()[name].data.copy_(...)``, so the next forward or step rounds ``value`` in any case.

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
        if self.is_param:
            _torch.share_attributes(value, half)
        self.value = value
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.is_lent = False
        self.grad_shown = False
        self.half_data_writes: _torch.DataWrites | None = None
        self.value_data_writes: _torch.DataWrites | None = None
        self.is_exported = False
        self.address = half.data_ptr()
        self.note_equal()
        self.register()

    def register(self) -> None:
        """Index this master under both of its tensors."""
        master_index.by_tensor[id(self.half)] = master_index.by_tensor[id(self.value)] = self
        master_index.by_memory = None

    def add_slot(self, module: torch.nn.Module, name: str) -> None:
        """Note that ``module.name`` is ``half``."""
        tensors: Any = module._parameters if name in module._parameters else module._buffers
        if not any(known is tensors and known_name == name for known, known_name in self.slots):
            self.slots.append((tensors, name))

    def retire(self) -> None:
        """Leave ``half``, which is float32 again, without a master; optimizers may still hold ``value``."""
        master_index.by_tensor.pop(id(self.half), None)

    def clear_gradient(self) -> None:
        """Clear ``value.grad``, the sum of what blocks have given."""
        self.grad_shown = False
        self.value.grad = None

    def show_gradient(self) -> None:
        """Show ``value.grad``, rounded, in the model if the block cleared ``half.grad`` and gave no new gradient."""
        if self.value.grad is not None and self.half.grad is None:
            self.half.grad = self.value.grad.detach().to(self.dtype)
            self.grad_shown = True

    # -- which copy was written ----------------------------------------------------------------------------------------
    def note_equal(self) -> None:
        """Note that both copies are equal now: nothing that happened before counts as written."""
        self.half_version = self.half._version
        self.value_version = self.value._version
        self.is_exported = False
        address = self.half.data_ptr()
        if address != self.address:
            self.address = address
            self.half_data_writes = None  # what ``data`` was before is not the weight's memory any more
            master_index.by_memory = None
        self.forget_data_writes()

    def forget_data_writes(self) -> None:
        """Forget what was written through ``data`` of either copy so far."""
        if self.half_data_writes is not None:
            self.half_data_writes.forget()
        if self.value_data_writes is not None:
            self.value_data_writes.forget()

    def data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor.data``, for which a script asks now; ``tensor`` is one of both copies.

        Where the other copy was written, ``tensor`` follows first: the script finds in ``data`` what is in force, and
        what it then writes there is the later write.
        """
        half = self.half
        value = self.value
        if tensor is half:
            others = self.value_data_writes
            if value._version != self.value_version or self.is_exported or (others is not None and others.happened):
                align_written([self])
            writes = self.half_data_writes
        elif tensor is value:
            others = self.half_data_writes
            if (
                half._version != self.half_version
                or half.data_ptr() != self.address
                or (others is not None and others.happened)
            ):
                align_written([self])
            writes = self.value_data_writes
        else:  # a new tensor with the id of one that is gone
            return _torch.data_of(tensor)
        data = None if writes is None else writes.given_again(tensor)
        if data is None:
            with copies_lock:
                data = self.data_writes_of(tensor).give_out(tensor)
        return data

    def data_writes_of(self, tensor: torch.Tensor) -> _torch.DataWrites:
        """Return what knows of writes through the ``data`` of ``tensor``, one of both copies."""
        if tensor is self.half:
            if self.half_data_writes is None:
                self.half_data_writes = _torch.DataWrites()
            return self.half_data_writes
        if self.value_data_writes is None:
            self.value_data_writes = _torch.DataWrites()
        return self.value_data_writes

    def note_assigned(self, tensor: torch.Tensor) -> None:
        """Count ``tensor`` as written: its ``data`` was assigned.

        A ``data`` tensor that was handed out before no longer belongs to a weight.
        """
        if tensor is self.half:
            self.half_data_writes = None
        elif tensor is self.value:
            self.value_data_writes = None
        else:
            return
        master_index.by_memory = None
        self.count_as_written(tensor)

    def count_as_written(self, tensor: torch.Tensor) -> None:
        """Treat ``tensor``, one of both copies, as written: it may have been, and torch does not tell."""
        other_written = value_maybe_written([self]) if tensor is self.half else half_written([self])
        if other_written:
            align_written([self])
        self.data_writes_of(tensor).add()

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
        self.value_data_writes = None
        master_index.by_memory = None
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
        self.value.copy_(_merged(self.value, exact, self.dtype))
        self.push()

    def push(self) -> None:
        """Round the master into its half weight, whatever that holds."""
        push_all([self])
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
        align_written([self])
        # Both copies go through the memo, so that an optimizer which is copied along holds the copy's masters.
        half = copy.deepcopy(self.half, memo)
        value = copy.deepcopy(self.value, memo)
        if not _torch.has_storage(half):
            return self  # a compiler's stand-in for the module, which is never stepped
        clone = memo[id(self)] = Master(half, value)  # its slots are found by ``masters_of``
        clone.push()  # ``half`` may have been copied with its module, before it followed ``value``
        return clone

    def __reduce__(self) -> Any:
        align_written([self])
        return Master, (self.half, self.value)


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
    master = master_index.by_tensor.get(id(tensor))
    if master is None:
        return None
    if master.value is not tensor and master.half is not tensor:  # a new tensor with the id of one that is gone
        return None
    return master


# -- what a script has set on a weight ---------------------------------------------------------------------------------
def follow_requires_grad(masters: Iterable[Master]) -> None:
    """Make each master require gradients as its weight does: scripts choose by that what to clip.

    Attributes of the script's own need nothing: both copies share them.
    """
    for master in masters:
        requires_grad = master.half.requires_grad
        if master.value.requires_grad != requires_grad:
            master.value.requires_grad_(requires_grad)


# -- which copy was written --------------------------------------------------------------------------------------------
def half_written(masters: Iterable[Master]) -> list[Master]:
    """Return the masters whose half weight was written since both copies were equal."""
    # One condition, read for each of thousands of masters in each step.
    return [
        m
        for m in masters
        if (half := m.half)._version != m.half_version
        or half.data_ptr() != m.address
        or ((writes := m.half_data_writes) is not None and writes.happened)
    ]


def value_written(masters: Iterable[Master]) -> list[Master]:
    """Return the masters that were written themselves (``value``) since both copies were equal."""
    return [
        m
        for m in masters
        if m.value._version != m.value_version or ((writes := m.value_data_writes) is not None and writes.happened)
    ]


def value_maybe_written(masters: Iterable[Master]) -> list[Master]:
    """As :func:`value_written`, with the masters that a script has saved, and so may write."""
    return [
        m
        for m in masters
        if m.value._version != m.value_version
        or m.is_exported
        or ((writes := m.value_data_writes) is not None and writes.happened)
    ]


def to_push_and_pull(masters: Sequence[Master]) -> tuple[list[Master], list[Master]]:
    """Return which masters are to be rounded into their half weights, and which are to take what these hold.

    Where both copies were written, what the half weight holds counts. Batch norm writes its buffers unseen, so a buffer
    is pulled unless its master was written.
    """
    to_pull = set(half_written(masters))
    to_push = [master for master in value_maybe_written(masters) if master not in to_pull]
    to_pull.update(master for master in masters if not master.is_param)
    to_pull.difference_update(to_push)
    return to_push, [master for master in masters if master in to_pull]


# -- keep both copies equal --------------------------------------------------------------------------------------------
def push_written(masters: Sequence[Master]) -> None:
    """Round masters that a script wrote into their half weights, before a forward. No host sync.

    Half weights that were written are used as they are. Their masters only follow the module: ``model.to(device)`` and
    ``model.float()`` are such writes, too (:meth:`Master.follow_module`).
    """
    written = [*half_written(masters), *value_maybe_written(masters)]
    if written:
        _torch.run_untraced(_bring_up_to_date, written, pulls=False)


def align_written(masters: Sequence[Master]) -> None:
    """Make both copies equal where a script wrote one of them, before a step or a copy. No host sync."""
    buffers = [master for master in masters if not master.is_param]
    written = [*half_written(masters), *value_maybe_written(masters), *buffers]
    if written:
        _torch.run_untraced(_bring_up_to_date, written, pulls=True)


def align_for_save(masters: Sequence[Master]) -> None:
    """As :func:`align_written`, but leave alone what an earlier save has given out: it may not have been written.

    The save may be made in another thread, while a forward computes with the half weights.
    """
    buffers = [master for master in masters if not master.is_param]
    written = [*half_written(masters), *value_written(masters), *buffers]
    if written:
        _torch.run_untraced(_bring_up_to_date, written, pulls=True)


def _bring_up_to_date(written: Sequence[Master], *, pulls: bool) -> None:
    """Make each master follow its module; push what a script wrote to it; if ``pulls``, pull half weights it wrote."""
    tensors_are_stand_ins = torch.compiler.is_compiling() or _torch.in_fake_mode()
    if tensors_are_stand_ins:
        return
    masters = list(dict.fromkeys(written))
    with copies_lock:  # another thread may have done so meanwhile: look again
        for master in masters:
            master.follow_module()
        to_push, to_pull = to_push_and_pull(masters)
        if pulls:
            pull_all(to_pull)
        push_all(to_push)


def pull_all(masters: Sequence[Master]) -> None:
    """Take what was written to half weights into their masters; elements that were not keep their low bits."""
    with copies_lock:
        _merge_([master.value for master in masters], [master.half for master in masters])
        for master in masters:
            master.note_equal()


@_torch.without_grad
def _merge_(values: Sequence[torch.Tensor], halves: Sequence[torch.Tensor]) -> None:
    """Write :func:`_merged` of each of ``values`` and its half weight into it, in fused passes over chunks."""
    for indices in _torch.in_chunks(halves):
        destinations = [values[index].detach() for index in indices]
        chosen = [halves[index].detach() for index in indices]
        flat_values = torch.cat([value.reshape(-1) for value in destinations])
        flat_halves = torch.cat([half.reshape(-1) for half in chosen])
        parts = torch.split(_merged(flat_values, flat_halves, flat_halves.dtype), [half.numel() for half in chosen])
        shaped = [part.view(value.shape) for part, value in zip(parts, destinations, strict=True)]
        _torch.foreach_copy_(destinations, shaped)


def _merged(value: torch.Tensor, written: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` with the elements of ``written`` where it does not round to them in ``dtype``, bit for bit."""
    wide = written.float()
    rounded = value.to(dtype).float()
    return torch.where(_torch.bits(rounded) == _torch.bits(wide), value, wide)


@_torch.eager
def push_all(masters: Sequence[Master]) -> None:
    """Round masters that an optimizer stepped, or a script wrote, into their half weights, in fused passes.

    As under apex, which wrote through ``data``, the half weights keep their versions: a graph that holds them can still
    go backward. A GAN needs that if its discriminator steps between the forward and the backward pass of the
    generator's loss.
    """
    if not masters:
        return
    with copies_lock:
        _push(masters)


@_torch.without_grad
def _push(masters: Sequence[Master]) -> None:
    halves = []
    values = []
    versions = []
    for master in masters:
        halves.append(master.half)
        values.append(master.value)
        versions.append(master.half._version)
    _torch.foreach_copy_(halves, values)
    _torch.set_versions(halves, versions)
    # :meth:`Master.note_equal` inline, for thousands of masters at each step, without what a push does not move.
    for master in masters:
        master.value_version = master.value._version
        master.is_exported = False
        if master.half_data_writes is not None or master.value_data_writes is not None:
            master.forget_data_writes()


def align_all(masters: Sequence[Master]) -> None:
    """Make both copies of each master equal, also where nothing tells that a script wrote one. No host sync."""
    with copies_lock:
        for master in masters:
            master.follow_module()
        to_push, _ = to_push_and_pull(masters)
        pushed = set(to_push)
        pull_all([master for master in masters if master not in pushed])
        push_all(to_push)
