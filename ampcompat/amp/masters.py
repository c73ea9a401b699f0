"""Float32 masters of half tensors, and the invariant that ties the two: ``half == value.to(half.dtype)``, bitwise.

A master belongs to the model's tensor. Its module holds it (:class:`ampcompat.amp.half_weights.HalfWeights`), so that
deepcopy and pickle take it along; either tensor leads to it (:func:`master_of`); optimizers borrow its float32 side.
The life of a master, as a table of what each event does to its two sides:

=======================================  =============================  =======================================
event                                    half (the model's tensor)      value (the float32 master)
=======================================  =============================  =======================================
``initialize``                           rounded from float32           the float32 weight, to the bit
``optimizer.step``                       rounded from value             stepped by the optimizer
``load_state_dict``                      rounded from what was loaded   what was loaded
half written, counters move              kept                           takes the elements that differ
half written past the counters           kept; a step may overwrite it  the same, if compared; else kept
half written, then written back          kept                           what it was before the first write
value written                            rounded from value             kept
both written after ``state_dict``        rounded from value             half's elements where half moved
parameter replaced in its module         the new parameter, cast        takes the elements that differ
buffer assigned in its module            the new buffer, as it is       what differs; dropped at another dtype
replaced, and added to an optimizer      stays, of no model             stays in its group; the new has its own
replaced under one of its names: untied  stays under the others         stays; the new one has its own
replaced by another's half: tied to it   stays, of no model             stays; the name is the other master's
``model.to(device)``                     moved                          follows
other strides (``memory_format=``)       laid out anew                  keeps its strides, for fused optimizers
``model.float()`` and the like           cast back                      takes the elements that differ
deepcopy, pickle                         copied                         copied
``initialize`` at another level          float32 again, from value      dropped
=======================================  =============================  =======================================

"Has its own" and "is the other's" speak of masters: what plain torch would train is trained, in the group that was
asked for. "Elements that differ" are those where ``value`` does not round to what ``half`` holds: every element that no
other code wrote keeps its low bits.

Writes are found by version counters and data pointers. Writes past both (``p.data.clamp_()``, collectives on
``p.data``) are found by comparing values: in the first comparisons and steps of a master's life, from then on wherever
such a write was seen once, and whenever a master is saved or copied. Elsewhere the next step overwrites them.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp.half_weights import ensure_half_weights, half_weights, masters_by_name

#: How often a new master is compared by value.
EARLY_COMPARISONS = 4
#: Its first steps: after each of them it is compared twice more (WGAN clips weights after a step).
EARLY_STEPS = 3


@dataclass(eq=False, slots=True)
class Slot:
    """Locate a half tensor: the module's dict of parameters or buffers, its name in there, and the module."""

    tensors: dict[str, torch.Tensor | None]
    name: str
    module: weakref.ref[torch.nn.Module]

    @property
    def held(self) -> torch.Tensor | None:
        """What is there now; None where there is nothing, or the module is gone."""
        if self.module() is None:
            return None
        return self.tensors.get(self.name)

    def is_at(self, module: torch.nn.Module | None, name: str) -> bool:
        """Whether this is ``module.name``."""
        return self.module() is module and self.name == name


@dataclass
class Watch:
    """What the comparisons by value of one master need.

    Attributes:
        fingerprint: Of ``half``, when both sides were last equal: it tells which side was written.
        early_steps: How many of the first steps are still to come; each adds comparisons.
    """

    fingerprint: torch.Tensor | None = None
    early_steps: int = EARLY_STEPS


class Master:
    """One half tensor of a model and its float32 master.

    Args:
        half: The model's tensor.
        value: The float32 values to start from; those of ``half`` if None.
        adopt: Make ``value`` itself the master, without a copy.

    Attributes:
        half: The model's parameter or buffer; ``initialize`` gave it its ``dtype``.
        value: The master: a float32 ``Parameter`` of the same shape and device.
        slots: Where ``half`` is held (several for tied weights).
        took_over: Whether ``half`` replaced the parameter that optimizers were given, which ``value`` was made for.

    What tells whether either side was written since both were equal:

    Attributes:
        synced: Version of ``half``, version of ``value`` and address of ``half`` at that time.
        comparisons: Comparisons by value that are left; infinite once a write past the version counters was seen.
        watch: What these need; None where no comparison is left.
        half_at_hand_out: Copy of ``half`` at the time when ``value`` was handed out, to be written perhaps; else None.
        value_before_writes: ``value`` before other code wrote ``half``, until the next step; else None.

    What tells whether a script has cleared or edited a half gradient:

    Attributes:
        added_grad: The gradient of ``half`` that was last unscaled into ``value.grad``, and its version then.
    """

    def __init__(self, half: torch.Tensor, value: torch.Tensor | None = None, adopt: bool = False) -> None:
        if half.is_inference():  # that of a copy made under inference_mode, say
            _torch.leave_inference_mode(half)
        self.half = half
        self.dtype = half.dtype
        if value is not None and adopt:
            _torch.leave_inference_mode(value)
            self.value = value
        else:
            with torch.inference_mode(False), torch.no_grad():
                exact = (half if value is None else value).detach().to(half.device, torch.float32, copy=True)
                self.value = torch.nn.Parameter(exact, requires_grad=half.requires_grad)
        self.slots: list[Slot] = []
        self.took_over = False
        self.added_grad: tuple[torch.Tensor, int] | None = None
        self.half_at_hand_out: torch.Tensor | None = None
        self.value_before_writes: torch.Tensor | None = None
        self.comparisons: float = 0
        self.watch: Watch | None = None
        if self.is_param:  # a buffer is compared when it is saved or copied; forwards read its half side alone
            self.comparisons = EARLY_COMPARISONS
            self.watch = Watch()
        self.record_versions()
        self.register()

    @property
    def is_param(self) -> bool:
        """Whether ``half`` is a parameter, and no buffer."""
        return isinstance(self.half, torch.nn.Parameter)

    def register(self) -> None:
        """Index this master under both of its tensors."""
        index = state.masters.by_tensor
        index[id(self.half)] = index[id(self.value)] = self

    def add_slot(self, module: torch.nn.Module, name: str) -> None:
        """Record that ``module.name`` is ``half``."""
        if not any(slot.is_at(module, name) for slot in self.slots):
            tensors: Any = module._parameters if name in module._parameters else module._buffers
            self.slots.append(Slot(tensors, name, weakref.ref(module)))

    def retire(self) -> None:
        """Leave ``half``, which is float32 again, without a master; optimizers may still hold ``value``."""
        state.masters.by_tensor.pop(id(self.half), None)

    def drop_gradient(self) -> None:
        """Forget what blocks have left in ``value.grad``."""
        self.added_grad = None
        self.value.grad = None

    def record_versions(self) -> None:
        """Record the versions of both sides, which are equal now."""
        self.synced = (self.half._version, self.value._version, self.half.data_ptr())
        self.half_at_hand_out = None
        if self.watch is not None:
            self.watch.fingerprint = _torch.fingerprint(self.half)

    def hand_out(self) -> torch.Tensor:
        """Return the master for a state dict or ``master_params``: what is written into it, ``.data`` too, counts."""
        if self.half_at_hand_out is None:
            self.half_at_hand_out = self.half.detach().clone()
        return self.value.detach()

    @torch.no_grad()
    def push(self) -> None:
        """Write the master into the model."""
        self.value_before_writes = None
        self.half.copy_(self.value)
        self.record_versions()

    # -- reconcile: four cases, by what is known of a write ------------------------------------------------------------
    @torch.no_grad()
    def reconcile(self, stepping: bool = False, compare: bool = False) -> bool:
        """Restore the invariant, whichever side was written.

        Args:
            stepping: An optimizer is about to step: what was written is meant to stay, and is not written back later.
            compare: Compare a parameter by value in any case, since ``value`` is about to be saved or copied.

        Returns:
            Whether either side had been written.

        Host syncs: one where values are compared, one where ``value`` was handed out.
        """
        if self.value.device != self.half.device:
            self._follow_device()
        if self.half.dtype != self.dtype:
            self._keep_dtype()
        half_version, value_version, half_address = self.synced
        half_moved = self.half._version != half_version or self.half.data_ptr() != half_address
        value_moved = self.value._version != value_version
        if self.half_at_hand_out is not None:
            return self._merge_since_hand_out(self.half_at_hand_out, half_moved, value_moved, stepping, compare)
        if half_moved:
            self._take(self.half, kept=self._rounds_to(self.half), remember=not stepping)
            self._round_into(self.half)
            return True
        if value_moved:
            self.push()
            return True
        if (compare or self.comparisons) and not _is_traced():
            return self._follow_uncounted_write(stepping)
        return False

    def _follow_uncounted_write(self, stepping: bool) -> bool:
        """Find a write past the version counters by comparing values, and follow it; whether there was one.

        Reads the device: one host sync, two where the sides differ.
        """
        if not self.is_param:  # it has no fingerprint that tells which side was written: take the half one
            self._take(self.half, kept=self._rounds_to(self.half))
            self._round_into(self.half.data)
            return False
        fingerprint = None if self.watch is None else self.watch.fingerprint
        self._count_comparison()
        if not self._sides_differ():
            return False
        half_moved = fingerprint is None or not torch.equal(_torch.fingerprint(self.half), fingerprint)
        self._always_compare()
        if half_moved:
            self._take(self.half, kept=self._rounds_to(self.half), remember=not stepping)
            self._round_into(self.half.data)
        else:  # the master was written: ``group["params"][0].data.mul_()``
            self.push()
        return True

    def _merge_since_hand_out(
        self, half_then: torch.Tensor, half_moved: bool, value_moved: bool, stepping: bool, compare: bool
    ) -> bool:
        """Take half's elements where half moved since ``value`` was handed out, and the master's elsewhere.

        ``half_then`` is half at that time. Returns whether either side had been written.
        """
        unmoved = _torch.bits(self.half.detach()) == _torch.bits(half_then)
        is_counted = half_moved or value_moved
        can_read = not _is_traced()
        # A step need not know of a write past the version counters: it takes the elements that moved all the same.
        if can_read and not is_counted and not stepping and not bool(unmoved.all()):
            half_moved = True
            self._always_compare()
        written = is_counted or (half_moved and self.is_param)
        if can_read and not written and compare and self.is_param:
            written = self._sides_differ()  # the master that was handed out, perhaps
        self._take(self.half, kept=unmoved, remember=half_moved and not stepping)
        self._round_into(self.half if is_counted else self.half.data)
        return written

    def _take(self, exact: torch.Tensor, kept: torch.Tensor, remember: bool = False) -> None:
        """Take ``exact`` into the master, but for the elements that are ``kept``.

        Elements that were written and are written back (an attack on the weights, an average put in for an evaluation)
        get the master back that they had: the rounded one would lose updates below the rounding. ``remember`` the
        master for that, from the first write on until the next step.
        """
        taken = exact.float()
        before = self.value_before_writes
        if before is not None:
            is_written_back = before.to(self.dtype).float() == taken
            taken = torch.where(is_written_back, before, taken)
        elif remember and self.is_param:
            self.value_before_writes = self.value.detach().clone()
        self.value.copy_(torch.where(kept, self.value, taken))

    def _rounds_to(self, exact: torch.Tensor) -> torch.Tensor:
        """Where the master rounds to ``exact``, element by element: its low bits are worth keeping there."""
        return self.value.to(self.dtype).float() == exact.float()

    def _round_into(self, half: torch.Tensor) -> None:
        """Write the master into ``half``, for elements that compare as equal and are not: NaN, and -0.0 beside 0.0.

        Pass ``self.half.data`` to write past the version counter, where no counter has moved: a graph that holds the
        weight stays valid.
        """
        half.copy_(self.value)
        self.record_versions()

    def _count_comparison(self) -> None:
        """Use up one comparison, and with the last one what they need."""
        self.comparisons = max(0, self.comparisons - 1)
        if self.watch is not None and not self.comparisons and not self.watch.early_steps:
            self.watch = None

    def _always_compare(self) -> None:
        """Always compare by value from now on: some code writes without moving a version counter."""
        self.comparisons = math.inf
        if self.watch is None:
            self.watch = Watch()

    def _sides_differ(self) -> bool:
        """Whether ``half`` is not ``value`` as :meth:`push` rounds it, NaN included. One host sync."""
        rounded = torch.empty_like(self.half).copy_(self.value)
        return not torch.equal(_torch.bits(rounded), _torch.bits(self.half.detach()))

    def _follow_device(self) -> None:
        """Move the master after ``module.to(device)``; it keeps its identity, for the optimizer that holds it."""
        warn_once(
            "master device",
            f"The model moved from {self.value.device} to {self.half.device} after amp.initialize - its master weights"
            " follow, but optimizer state does not - move the model before amp.initialize (D15).",
        )
        moved = self.value.data.to(self.half.device)
        try:
            self.value.data = moved
        except RuntimeError as error:
            raise RuntimeError(
                f"The model moved from {self.value.device} to {moved.device} after amp.initialize - tensors there are"
                " of another kind, and the masters that the optimizer holds cannot become such - move the model before"
                " the optimizer is made and amp.initialize is called."
            ) from error
        if self.value.grad is not None:
            self.value.grad = self.value.grad.to(self.half.device)
        self.half_at_hand_out = None
        self.value_before_writes = None

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
        self._take(exact, kept=self._rounds_to(exact))
        self.push()

    def __deepcopy__(self, memo: dict[int, Any]) -> Master:
        self.reconcile(compare=True)
        # Both sides go through the memo, so that an optimizer which is copied along holds the copy's masters.
        half = copy.deepcopy(self.half, memo)
        value = copy.deepcopy(self.value, memo)
        if not _torch.has_storage(half):
            return self  # a compiler's stand-in for the module, which is never stepped
        clone = memo[id(self)] = Master(half, value, adopt=True)  # its slots are found by ``masters_of``
        return clone

    def __reduce__(self) -> Any:
        self.reconcile(compare=True)
        return Master, (self.half, self.value, True)


def _is_traced() -> bool:
    """Whether a compiler or exporter looks on: values cannot be read."""
    return torch.compiler.is_compiling() or _torch.in_fake_mode()


def _recast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast ``tensor`` in place, and its gradient; a master needs the version counter that a normal tensor has."""
    _torch.leave_inference_mode(tensor)
    grad = tensor.grad
    tensor.grad = None  # torch refuses a gradient of another dtype than the tensor's
    tensor.data = tensor.data.to(dtype)
    if grad is not None:
        tensor.grad = grad.to(dtype)


# -- find --------------------------------------------------------------------------------------------------------------
def master_of(tensor: torch.Tensor) -> Master | None:
    """The master whose half or float32 side is ``tensor``, if there is one."""
    master = state.masters.by_tensor.get(id(tensor))
    if master is None:
        return None
    if master.value is not tensor and master.half is not tensor:  # a new tensor with the id of one that is gone
        return None
    return master


def masters_of(model: torch.nn.Module) -> list[Master]:
    """Every master in ``model``, each once; cached until a master is made, dropped or moved anywhere."""
    index = state.masters
    cached = index.by_model.get(model)
    if cached is not None and cached[0] == index.generation:
        return cached[1]
    if not index.follows_modules:
        index.follows_modules = True
        state.undo.callback(_torch.on_module_registration(_module_registered).remove)
    masters = masters_in(model.modules())
    index.by_model[model] = (index.generation, masters)
    return masters


def _module_registered(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Look masters of models up again when a module with masters moves into another (``a[0] = b[0]``)."""
    if module is not None and any(masters_by_name(part) for part in module.modules()):
        state.masters.generation += 1


def masters_in(modules: Iterable[torch.nn.Module]) -> list[Master]:
    """Every master of ``modules``' own tensors, each once."""
    unique: dict[int, Master] = {}
    for module in modules:
        for name, master in masters_by_name(module).items():
            unique[id(master)] = master
            master.add_slot(module, name)  # those of a copied or unpickled model have no slots yet
    return list(unique.values())


def own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of ``module``'s own parameters and buffers, but for parameters that ``fully_shard`` holds."""
    held = (*module._parameters.items(), *module._buffers.items())
    sharded: frozenset[str] = module.__dict__.get("_amp_sharded", frozenset())
    return [(name, tensor) for name, tensor in held if tensor is not None and name not in sharded]


# -- own ---------------------------------------------------------------------------------------------------------------
def ensure_master(module: torch.nn.Module, name: str, value: torch.Tensor | None = None, adopt: bool = False) -> Master:
    """Return the master of ``module``'s half tensor ``name``; made if missing, as :class:`Master` says."""
    half: Any = module._parameters.get(name, module._buffers.get(name))
    record = half_weights(module) or ensure_half_weights(module, half.dtype, has_masters=True)
    held = record.masters
    if name in held and held[name].half is not half:
        held[name].add_slot(module, name)
        _follow_replacement(held[name])
    if name not in held or held[name].half is not half:
        master = master_of(half)
        held[name] = Master(half, value, adopt) if master is None else master
        state.masters.generation += 1
    held[name].add_slot(module, name)
    return held[name]


def drop_master(master: Master) -> None:
    """Forget ``master``; its half tensor stays."""
    for slot in master.slots:
        module = slot.module()
        if module is not None:
            masters_by_name(module).pop(slot.name, None)
    master.retire()
    state.masters.generation += 1


def set_masters(module: torch.nn.Module, held: dict[str, Master]) -> None:
    """Make ``held`` the masters of ``module``'s own tensors."""
    record = half_weights(module)
    if record is not None:
        record.masters = dict(held)
    state.masters.generation += 1


# -- reconcile ---------------------------------------------------------------------------------------------------------
def reconcile(masters: Iterable[Master], stepping: bool = False) -> None:
    """Restore the invariant of each of ``masters``.

    Host syncs: as :meth:`Master.reconcile`, for suspects alone: no others are looked at.
    """
    # Inline, as one condition: models have thousands of masters, and nearly always none of them is a suspect.
    suspects = [
        m
        for m in masters
        if ((half := m.half)._version, m.value._version, half.data_ptr()) != m.synced  # written
        or m.half_at_hand_out is not None  # written past the counters, perhaps
        or m.comparisons
        or len(m.slots) != 1  # tied
        or m.slots[0].tensors.get(m.slots[0].name) is not half  # replaced in its module
    ]
    for master in suspects:
        _torch.run_untraced(_follow_replacement, master)
        _torch.run_untraced(master.reconcile, stepping)


# -- parameters that are replaced --------------------------------------------------------------------------------------
def follow_replacements(modules: Iterable[torch.nn.Module], trained: Collection[int] = ()) -> None:
    """Follow tensors that were put in the place of half ones of ``modules``, now and not at their next forward.

    Args:
        modules: Modules under amp, or not.
        trained: Ids of the parameters of optimizers that are about to come under amp.
    """
    for master in masters_in(modules):
        _follow_replacement(master, trained)


def _follow_replacement(master: Master, trained: Collection[int] = ()) -> None:
    """Follow what was put in the place of ``half`` (``module.weight = nn.Parameter(...)``).

    A parameter that replaces ``half`` in all of its slots becomes the half side of ``master``, and so is trained. It
    gets a master of its own where that is not what was meant: another slot still holds ``half`` (the weight was
    untied), an optimizer was given the new parameter, or its shape is another. Where another module holds it (the
    weight was tied to that one's), its slots become those of that one's master.

    What ``functional_call`` puts there for the time of a forward is left alone, and plain tensors that other code does.
    """
    replaced: dict[torch.Tensor, list[Slot]] = {}
    is_held = False
    for slot in master.slots:
        now = slot.held
        if now is master.half:
            is_held = True
        elif now is not None and _torch.has_storage(now):
            replaced.setdefault(now, []).append(slot)
    if not replaced or _torch.in_functional_call():
        return
    for now, slots in replaced.items():
        if not isinstance(master.half, torch.nn.Parameter):
            _follow_buffer(master, now, slots, is_held)
        elif isinstance(now, torch.nn.Parameter):
            _follow_parameter(master, now, slots, is_held, trained)
        is_held = is_held or now is master.half


def _follow_parameter(
    master: Master, now: torch.nn.Parameter, slots: list[Slot], is_held: bool, trained: Collection[int]
) -> None:
    """Follow ``now``, which ``slots`` hold in the place of ``master.half``.

    ``is_held``: other slots of the master still hold its half. ``trained``: as in :func:`follow_replacements`.
    """
    where = f"{slots[0].name!r} of a {type(slots[0].module()).__name__}"
    other = master_of(now)
    _refuse_replacement(now, where, other)
    if _is_held_elsewhere(now, slots):
        _move_slots(master, slots, other or _own_master(now, master.dtype))
        return
    is_resized = now.shape != master.value.shape
    optimizers = _optimizers_of(now)
    is_trained = bool(optimizers) or id(now) in trained
    if is_held or is_resized or is_trained:
        _move_slots(master, slots, _own_master(now, master.dtype))
        for optimizer in optimizers:
            optimizer._amp_stash.groups = []
            optimizer._amp_stash.look_up(optimizer)  # it holds the master from now on
        if not is_trained:
            _warn_of_untrained(master, now, where)
        return
    warn_once(
        f"replaced {where}",
        f"Parameter {where} was replaced after amp.initialize - the optimizer holds the master of the old one - the"
        " master takes the new values and continues to train them (D15).",
    )
    _take_over(master, now, slots)


def _refuse_replacement(now: torch.Tensor, where: str, other: Master | None) -> None:
    """Raise for what cannot be a half tensor in a module; ``other`` is its master."""
    if _torch.is_sharded(now):
        raise RuntimeError(
            f"Parameter {where} was sharded (fully_shard) after amp.initialize made its float32 master - masters are"
            " not sharded, FSDP2's own shards are - call fully_shard before the optimizer is made and before"
            " amp.initialize."
        )
    if other is not None and other.value is now:
        raise RuntimeError(
            f"Parameter {where} was replaced by a float32 master (of amp.master_params, or an optimizer's groups) -"
            f" the optimizer steps that one, and the model computes with a {other.dtype} parameter - put a copy there:"
            " torch.nn.Parameter(master.detach().clone())."
        )


def _warn_of_untrained(master: Master, now: torch.Tensor, where: str) -> None:
    """Warn of a new parameter that has a master of its own, and no optimizer."""
    if now.shape != master.value.shape:
        warn_once(
            f"resized {where}",
            f"Parameter {where} was replaced by one of shape {tuple(now.shape)} after amp.initialize - the optimizer"
            f" holds the old one's master, of shape {tuple(master.value.shape)}, and does not train the new one - give"
            " it to optimizer.add_param_group, or make a new optimizer and call amp.initialize again.",
        )
        return
    warn_once(
        f"untied {where}",
        f"Parameter {where} was untied after amp.initialize from the weight that it shared with another module - no"
        " optimizer trains the new parameter, as in plain PyTorch - give it to optimizer.add_param_group, or untie"
        " before the optimizer is made.",
    )


def _follow_buffer(master: Master, now: torch.Tensor, slots: list[Slot], is_held: bool) -> None:
    """Follow a buffer that code assigned (``self.mean = ...`` in a forward), while its dtype and shape stay."""
    if not is_held and now.dtype == master.dtype and now.shape == master.value.shape:
        _take_over(master, now, slots)
        return
    for slot in slots:
        module: Any = slot.module()
        masters_by_name(module).pop(slot.name)
    master.slots = [slot for slot in master.slots if slot not in slots]
    state.masters.generation += 1


def _is_held_elsewhere(param: torch.Tensor, slots: list[Slot]) -> bool:
    """Whether a module other than ``slots``, of a model under amp or known to the master, holds ``param``."""

    def is_elsewhere(module: torch.nn.Module | None, name: str) -> bool:
        return not any(slot.is_at(module, name) for slot in slots)

    master = master_of(param)
    if master is not None:
        for slot in master.slots:
            if slot.held is param and is_elsewhere(slot.module(), slot.name):
                return True
    for model in state.models.live:
        for module in model.modules():
            for name, held in module._parameters.items():
                if held is param and is_elsewhere(module, name):
                    return True
    return False


def _optimizers_of(param: torch.Tensor) -> list[Any]:
    """Return the optimizers under amp that hold ``param``, or its master."""
    master = master_of(param)
    sides = {id(param)} if master is None else {id(param), id(master.value)}
    holders = []
    for optimizer in state.optimizers.listed():
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        if held & sides:
            holders.append(optimizer)
    return holders


def _own_master(param: torch.Tensor, dtype: torch.dtype) -> Master:
    """Return the master of ``param``, which is cast to ``dtype``; made of its values as they are if missing."""
    exact = param.detach()
    _recast(param, dtype)
    master = master_of(param)
    if master is None:
        return Master(param, exact)
    master.dtype = dtype
    return master


def _move_slots(master: Master, slots: list[Slot], other: Master) -> None:
    """Make ``slots`` of ``master`` slots of ``other``."""
    for slot in slots:
        module = slot.module()
        if module is None:
            continue
        record = half_weights(module) or ensure_half_weights(module, other.dtype, has_masters=True)
        record.masters[slot.name] = other
        other.add_slot(module, slot.name)
    master.slots = [slot for slot in master.slots if slot not in slots]
    state.masters.generation += 1


def _take_over(master: Master, now: torch.Tensor, slots: list[Slot]) -> None:
    """Put ``now``, which ``slots`` hold, in the place of ``master.half``, with the values that it has."""
    other = master_of(now)
    if other is not None:
        other.reconcile(compare=True)
    exact = now.detach() if other is None else other.value.detach()
    drop_cleared_gradients([master])  # of the old half, whose gradient is not looked at any more
    _recast(now, master.dtype)
    with torch.no_grad():
        if exact.dtype == master.dtype:  # perhaps a copy of the old one, on another device: keep the low bits
            exact = exact.to(master.value.device)
            master._take(exact, kept=master._rounds_to(exact))
        else:
            master.value.copy_(exact)
    master.slots = slots
    rebind(master, now)


def rebind(master: Master, now: torch.Tensor) -> None:
    """Make ``now`` the half side of ``master`` in every slot of a tied weight, and write the master into it."""
    master.half = now
    master.added_grad = None
    master.took_over = True
    master.register()
    for slot in master.slots:
        module = slot.module()
        if module is None or slot.held is None:
            continue
        slot.tensors[slot.name] = now
        record = half_weights(module) or ensure_half_weights(module, master.dtype, has_masters=True)
        held = record.masters
        if held.get(slot.name) is not master:
            held[slot.name] = master
            state.masters.generation += 1
    if master.value.device != now.device:
        master._follow_device()
    master.push()


def give_up_half(master: Master) -> None:
    """Give ``master.half`` a master of its own, with the gradient that it has; ``master`` is left without a model.

    For a parameter that took the place of an old one (``took_over``), when a script adds it to an optimizer. As in
    plain torch, the old one stays where it is in the groups, and has no gradients any more.
    """
    drop_cleared_gradients([master])
    half = master.half
    master.half = torch.nn.Parameter(half.detach().clone(), requires_grad=half.requires_grad)
    own = Master(half, master.value)
    own.added_grad = master.added_grad
    own.value.grad = master.value.grad
    _move_slots(master, master.slots, own)
    master.drop_gradient()
    master.took_over = False
    master.register()
    master.record_versions()


def sync_masters(model: torch.nn.Module) -> int:
    """Take what was written to the model's half weights into their float32 masters, or the other way round.

    Compares by value, and follows replaced parameters. Elements that were not written keep their master's low bits.
    Needed only after a write that moves neither a version counter nor the data pointer (``p.data.copy_()``,
    ``dist.broadcast(p.data)``), and before a compiled forward, which does not look, where masters were written or
    parameters replaced since the last step. apex had no such call: its masters kept their own values, and a write to
    half weights was lost at the next step.

    Args:
        model: A model given to ``amp.initialize``, or any module in one.

    Returns:
        How many tensors had been written. Reads the device.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"sync_masters got {type(model).__name__} - it takes a model - pass the module.")
    follow_replacements(model.modules())
    return sum([master.reconcile(compare=True) for master in masters_of(model)])


# -- gradients ---------------------------------------------------------------------------------------------------------
def drop_cleared_gradients(masters: list[Master]) -> bool:
    """Drop masters' gradients where the script has cleared the model's; return whether it edited any of the others.

    Cleared is a gradient that became None, and one that was set to zero in place: by ``grad.zero_()``, or by a
    ``zero_grad(set_to_none=False)`` of the model or of another optimizer. A product is no clearing, even where it comes
    to zero (clipping by a half norm that is inf multiplies by 0): the optimizer steps with the masters' gradients,
    which did not change, as under apex. Zeros of a product keep the signs of what was multiplied, and it is by
    these that the two are told apart; :func:`_was_cleared` says what is done where there is no sign.

    Host syncs: none while no code writes to half gradients; else one, and one for each that became zero.
    """
    written: list[Master] = []
    for master in masters:
        added = master.added_grad
        if added is None:
            continue
        grad = master.half.grad
        if grad is not added[0] or grad._version != added[1]:
            written.append(master)
    return bool(written) and _drop_cleared(written)


def _drop_cleared(written: list[Master]) -> bool:
    """Tell cleared from edited among ``written``, whose half gradients a script has written; drop the cleared ones'."""
    kept: list[Master] = []
    entries: list[torch.Tensor] = []
    for master in written:
        grad = master.half.grad
        if grad is None:
            master.drop_gradient()
        else:
            kept.append(master)
            entries.append(_entries(grad))
    if not kept:
        return False
    edited: list[Master] = []
    zeroed: list[Master] = []
    for master, has_bits in zip(kept, _torch.have_bits(entries), strict=True):  # -0.0 has one
        if has_bits:
            edited.append(master)
        else:
            zeroed.append(master)
    writes_of_edits = {_writes(master) for master in edited}
    for master in zeroed:
        if _was_cleared(master, writes_of_edits):
            master.drop_gradient()
    return bool(edited)


def _was_cleared(master: Master, writes_of_edits: set[int | None]) -> bool:
    """Tell whether a half gradient whose bits are all zero now was cleared, or came to zero by a product.

    A gradient that was zero before has nothing to clear: it stays, for the sake of momentum and weight decay. One that
    had a negative element would show -0.0 after a product. Of a gradient that was positive throughout, the others tell:
    it was part of an edit if another one was written as often (``writes_of_edits``) and still holds something.

    What cannot be told: positive gradients alone, all multiplied to zero, pass for cleared; so does one whose last
    backward pass was positive throughout while the sum of all passes is not. One that was positive, and cleared in
    place, passes for edited if others were edited by as many writes.
    """
    if master.value.grad is None:
        return True
    accumulated = _entries(master.value.grad)
    if not accumulated.any():
        return False
    had_negatives = bool((accumulated < 0).any())
    return had_negatives or _writes(master) not in writes_of_edits


def _writes(master: Master) -> int | None:
    """How often the half gradient was written since it was added; None: another tensor stands in its place."""
    grad = master.half.grad
    if grad is None or master.added_grad is None:
        return None
    added, version = master.added_grad
    if grad is not added:
        return None
    return grad._version - version


def _entries(grad: torch.Tensor) -> torch.Tensor:
    """The numbers that ``grad`` holds: the stored ones of a sparse gradient."""
    return grad._values() if grad.is_sparse else grad


# -- push --------------------------------------------------------------------------------------------------------------
@_torch.without_grad
def push(masters: list[Master]) -> None:
    """Write masters that an optimizer stepped into the model, in fused passes."""
    if not masters:
        return
    _torch.foreach_copy_([m.half for m in masters], [m.value for m in masters])
    for master in masters:
        master.synced = (master.half._version, master.value._version, master.synced[2])
        master.half_at_hand_out = None
        master.value_before_writes = None
        watch = master.watch
        if watch is None:
            continue
        if watch.early_steps:
            watch.early_steps -= 1
            master.comparisons = max(master.comparisons, 2)
        watch.fingerprint = _torch.fingerprint(master.half)
