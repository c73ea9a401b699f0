"""Function casts at O1 and O4: where they are on, which op runs in which dtype, and functions that users register.

========================  ===============================================================================
module                    holds
========================  ===============================================================================
:mod:`.ambience`          where casts are on in a process, and the patches of torch that this needs
:mod:`.contexts`          the contexts that change the casts of a thread; these are here by name, too
:mod:`.rules`             which rule the lists of :mod:`ampcompat.amp.lists` give to each op
:mod:`.kernels`           what applies a rule on autocast's dispatch keys
:mod:`.wrappers`          what applies one to a function written in Python, or registered
:mod:`.installation`      puts kernels and wrappers in force, and takes them back
:mod:`.refusals`          what is refused on half
:mod:`.registration`      ``register_*_function`` and the decorators
:mod:`.cpu_convolution`   half convolutions on the CPU
:mod:`.trees`             a function applied to every tensor in nested data
========================  ===============================================================================
"""

from ampcompat.amp.casts.contexts import (
    OFF,
    Casts,
    CastsOff,
    ForwardCasts,
    Saved,
    casts_off,
    disable_casts,
    disabled_depth,
    is_decided,
    mark_switched_off,
    restore,
    restored,
    save,
)

__all__ = ["OFF", "Casts", "CastsOff", "ForwardCasts", "Saved", "casts_off", "disable_casts"]
__all__ += ["disabled_depth", "is_decided", "mark_switched_off", "restore", "restored", "save"]
