"""What the tests need to know of ampcompat's insides: no other file of theirs reads private state.

What a public name tells, tests ask by that name: ``amp.master_params``, ``amp.state_dict``, ``amp.step_was_skipped``.
``amp._amp_state`` and what apex kept in ``optimizer._amp_stash`` are public too, since scripts use them; the tests of
these names are in ``tests/amp/core``.

``masters_of(model)`` and ``masters_by_name(module)`` give masters: ``half`` is the model's tensor, ``value`` the
float32 one.
"""

from dataclasses import fields

from ampcompat._state import state
from ampcompat.amp._amp_state import view_state
from ampcompat.amp.casts.rules import op_rules
from ampcompat.amp.half.masters import copies_lock as copies_lock
from ampcompat.amp.half.masters import half_written, value_written
from ampcompat.amp.half.masters import master_of as master_of
from ampcompat.amp.half.record import masters_by_name as masters_by_name
from ampcompat.amp.half.record import masters_of as masters_of
from ampcompat.amp.misuse import Watch
from ampcompat.amp.misuse import end_watch as end_watch
from ampcompat.amp.observers import observer_state
from ampcompat.amp.scaling.block import block_state, open_block_of
from ampcompat.amp.scaling.session import session_state


def is_due(master):
    """Whether anything tells that one copy of a weight was written, and the other has yet to follow."""
    return bool(half_written([master]) or value_written([master]))


def reset():
    """Undo every change to torch, and forget every session."""
    state.reset()


# -- the process -------------------------------------------------------------------------------------------------------
def is_anything_initialized():
    """Whether a call of ``initialize`` or ``init`` has succeeded."""
    return session_state.latest is not None


def view():
    """What ``amp._amp_state`` shows, by name."""
    return dict(view_state.view)


def warnings_given():
    """Keys of the warnings that are not given again."""
    return set(state.warned)


def undos():
    """How many changes to torch ``reset`` would undo."""
    return len(state.undo._exit_callbacks)


def fields_of_state():
    """The names of the fields of each part of the state of the process, by the class of the part."""
    return {type(part): [field.name for field in fields(part)] for part in state.parts()}


def sizes_of_state():
    """How many things each container in the state of the process holds."""
    found = {}
    for part in state.parts():
        for name, held in vars(part).items():
            if hasattr(held, "__len__"):
                found[f"{type(part).__name__}.{name}"] = len(held)
    return found


def process_state():
    """What is known of gradients in the whole process, by name."""
    return {"open_blocks": block_state.open_blocks}


def device_types_with_rules():
    """The device types that apex's op lists are registered for."""
    return set(op_rules.plans)


def observers():
    """The tools that are called with losses, gradients and steps; not amp's own watch over the first blocks."""
    return [observer for observer in observer_state.observers if not isinstance(observer, Watch)]


def has_policy(module):
    """Whether amp decides what the forward of ``module`` computes in."""
    return "_amp_policy" in vars(module)


# -- optimizers --------------------------------------------------------------------------------------------------------
def stash_of(optimizer):
    """What amp keeps beside ``optimizer``: for the test of the table of its attributes only."""
    return optimizer._amp_stash


def is_under_amp(optimizer):
    """Whether ``initialize`` has taken ``optimizer``."""
    return "_amp_stash" in vars(optimizer)


def scaler_of(optimizer):
    """The loss scaler of the first loss of the session that owns ``optimizer``, which may not be the latest."""
    return optimizer._amp_stash.session.scalers[0]


def float32_masters(optimizer):
    """The float32 masters that ``optimizer`` steps. Unlike ``amp.master_params``, this does not update them first."""
    return [master.value for master in optimizer._amp_stash.leaves.masters]


def is_in_block(optimizer):
    """Whether a ``scale_loss`` block of ``optimizer`` is open."""
    return open_block_of(optimizer._amp_stash.leaves) is not None


def skipped_as_far_as_known(optimizer):
    """Whether the last step was skipped; None while only the device knows. Reads nothing from the device."""
    stash = optimizer._amp_stash
    if stash.skipped is not None or stash.undecided_steps:
        return stash.skipped
    return stash.device_skipped


def overflow_flags(optimizer):
    """How many flags of overflows are kept for the next step."""
    stash = optimizer._amp_stash
    return len(stash.flags())


def is_watched():
    """Whether mistakes are looked for: in the first blocks."""
    return any(isinstance(observer, Watch) for observer in observer_state.observers)
