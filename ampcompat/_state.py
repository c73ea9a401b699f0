"""The one object that holds process-wide state: everything that ``reset()`` clears is a field here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ampcompat._types import Optimizer
    from ampcompat.amp.casts.contexts import Casts, Saved
    from ampcompat.amp.casts.rules import Plan, Rule
    from ampcompat.amp.half.masters import Master
    from ampcompat.amp.scaling.adapter import Adapter
    from ampcompat.amp.scaling.gradients import OpenBlock
    from ampcompat.amp.scaling.session import Session


class ThreadCasts(threading.local):
    """What one thread is currently inside.

    Attributes:
        forwards: Depth of casting forwards of initialized models; the outermost one owns autocast's weight cache.
        off: Depth of engine runs, optimizer steps and ``disable_casts`` blocks.
        regions: Open ``torch.autocast`` regions of the user, by device type.
        running: Half models in whose forward this thread is, outermost first.
    """

    forwards = 0
    off = 0
    regions: dict[str, int]
    running: list[torch.nn.Module]

    def __init__(self) -> None:
        self.regions = {}
        self.running = []


@dataclass(eq=False)
class CastState:
    """The ambient casts of the process (see :mod:`ampcompat.amp.casts.ambience`).

    Attributes:
        sessions: Calls of ``initialize`` and ``amp.init`` that cast functions, the latest last; not those whose models
            are gone.
        models: Every model under amp that is alive, copies of those that ``initialize`` was given included.
        ambient: The casts of the latest of these calls that is in force; None where none is.
        device_types: Where they hold: the device types of initialized models.
        owner: The thread that they hold in, the one that called ``initialize`` last.
        collected_in_trace: Whether a model was collected while the compiler traced, and its casts are yet to end.
        original: Autocast's state before the first change, for undo; None while no policy casts functions.
        patches: Undo of the patches that casting needs; None while they are not installed.
        undo_registered: Undo of the wrappers around functions that users registered.
        cpu_convolution: Undo of the CPU's own half convolutions; None while torch's are in force.
        thread: What the current thread is inside.
    """

    sessions: list[Session] = field(default_factory=list)
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    ambient: Casts | None = None
    device_types: tuple[str, ...] = ()
    owner: int = 0
    collected_in_trace: bool = False
    original: Saved | None = None
    patches: ExitStack | None = None
    undo_registered: ExitStack = field(default_factory=ExitStack)
    cpu_convolution: ExitStack | None = None
    thread: ThreadCasts = field(default_factory=ThreadCasts)


@dataclass(eq=False)
class OpRules:
    """The op rules that are on the dispatcher (see :mod:`ampcompat.amp.casts.installation`).

    Attributes:
        table: The rules by public name, as last read from the lists.
        plans: What is registered, by device type.
        undo: Undo of the registrations and wrappers.
        allow_banned: ``amp.init(allow_banned=True)``: banned ops run in float32.
    """

    table: dict[str, Rule] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)
    allow_banned: bool = False


@dataclass(eq=False)
class MasterIndex:
    """Index from a tensor to its master, by ``id`` of either copy, and lists of masters that are looked up often.

    Attributes:
        by_tensor: Masters by the id of their half tensor and of their float32 one. Check that the master found still
            holds that tensor: ids are reused.
        by_memory: Masters by what identifies the memory of either copy; None where it is to be listed anew.
        by_model: Masters of a whole model, valid for one ``generation``.
        generation: Counts masters that were made, dropped or moved to another module.
    """

    by_tensor: weakref.WeakValueDictionary[int, Master] = field(default_factory=weakref.WeakValueDictionary)
    by_memory: dict[int, weakref.WeakSet[Master]] | None = None
    by_model: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, list[Master]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    generation: int = 0


@dataclass(eq=False)
class ModelIndex:
    """Models of calls of ``initialize``, and what is built around them, as long as they are alive.

    Attributes:
        live: Models that ``initialize`` was given; copies of them are not listed.
        ddp: Every ``DistributedDataParallel``, torch's and apex's, made since the first ``initialize``; None before.
        sharded: Modules in models under amp that ``fully_shard`` was called on.
    """

    live: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    ddp: weakref.WeakSet[Any] | None = None
    sharded: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)


@dataclass(eq=False)
class OptimizerIndex:
    """Optimizers that calls of ``initialize`` were given, as long as they are alive.

    Attributes:
        live: Optimizers under amp; :meth:`listed` reads them at a third of the cost of iterating.
        disabled: Optimizers given to ``initialize(enabled=False)``.
        may_hold_dropped: Whether a call has come since those that a script has dropped were last collected: they are
            reference cycles, their methods are bound to them.
        gone: Ids of the leaves of optimizers that were collected since the last block ended: what gradients these have
            are unscaled.
    """

    live: weakref.WeakKeyDictionary[Optimizer, None] = field(default_factory=weakref.WeakKeyDictionary)
    disabled: weakref.WeakKeyDictionary[Optimizer, None] = field(default_factory=weakref.WeakKeyDictionary)
    may_hold_dropped: bool = False
    gone: set[int] = field(default_factory=set)

    def listed(self) -> list[Optimizer]:
        """Those under amp, in the order of their ``initialize`` calls."""
        optimizers = [reference() for reference in self.live.keyrefs()]
        return [optimizer for optimizer in optimizers if optimizer is not None]


def _nothing_initialized() -> dict[str, Any]:
    return {"hard_override": False, "allow_incoming_model_not_fp32": False, "verbosity": 1}


@dataclass(eq=False)
class State:
    """Process-wide state of ampcompat.

    Attributes:
        undo: Undo of every change made to torch; ``reset()`` runs them in reverse.
        done_once: What :meth:`undo_once` and :meth:`patch_once` were given.
        warned: Keys of the warnings and notes already given (see :func:`ampcompat._log.warn_once`).
        view: What ``amp._amp_state`` shows.
        session: The latest call of ``initialize``.
        loaded_scalers: Scales and clean passes that were loaded before a call of ``initialize`` with optimizers.
        models: Models under amp.
        optimizers: Optimizers under amp.
        masters: Index from tensors to masters.
        open_blocks: The ``scale_loss`` blocks that are open.
        casts: The ambient casts.
        rules: The op rules that are on the dispatcher.
        registered: Functions that users registered, by module and name: the holder, the name, and the rule.
        observers: Tools that are called with losses, gradients and steps.
        adapters: What blocks and steps must know of wrappers around models, for each kind of wrapper in use.
    """

    undo: ExitStack = field(default_factory=ExitStack)
    done_once: set[object] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    view: dict[str, Any] = field(default_factory=_nothing_initialized)
    session: Session | None = None
    loaded_scalers: list[tuple[float, int]] | None = None
    models: ModelIndex = field(default_factory=ModelIndex)
    optimizers: OptimizerIndex = field(default_factory=OptimizerIndex)
    masters: MasterIndex = field(default_factory=MasterIndex)
    open_blocks: list[OpenBlock] = field(default_factory=list)
    casts: CastState = field(default_factory=CastState)
    rules: OpRules = field(default_factory=OpRules)
    registered: dict[tuple[int, str], tuple[object, str, Rule]] = field(default_factory=dict)
    observers: list[object] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)

    def calls_shown(self) -> list[Session]:
        """The calls of ``initialize`` whose optimizers are alive, the later first; the latest call if there are none.

        ``amp._amp_state.loss_scalers`` are the first one's. A call without optimizers (for an averaged model) has
        scalers that no loss uses.
        """
        calls = [optimizer._amp_stash.session for optimizer in reversed(self.optimizers.listed())]
        if not calls and self.session is not None:
            calls = [self.session]
        return list(dict.fromkeys(calls))

    def undo_once(self, undo: Callable[[], None]) -> None:
        """Make ``reset`` call ``undo``, which undoes what there is, if anything: once, however often this is called."""
        if undo not in self.done_once:
            self.done_once.add(undo)
            self.undo.callback(undo)

    def patch_once(self, patch: Callable[[Callable[..., Any], ExitStack], None], called: Callable[..., Any]) -> None:
        """Apply ``patch``, which makes torch call ``called``, until a reset: once, however often this is called."""
        if (patch, called) not in self.done_once:
            self.done_once.add((patch, called))
            patch(called, self.undo)

    def reset(self) -> None:
        """Undo every change to torch and forget everything; live models and optimizers keep what they carry."""
        try:
            self.undo.close()
        finally:
            fresh = State()
            for part in fields(self):
                setattr(self, part.name, getattr(fresh, part.name))


state = State()
