"""Mixed precision as ``apex.amp`` offered it."""

# _amp_state is imported as a module first: a later ``import ampcompat.amp._amp_state`` then finds it imported and does
# not rebind the name, which scripts expect to be the state object.
from ampcompat import __version__
from ampcompat.amp import _amp_state as _amp_state_module  # noqa: F401 - see above
from ampcompat.amp import _initialize  # noqa: F401 - scripts say amp._initialize.applier without importing it
from ampcompat.amp._amp_state import _amp_state, master_params
from ampcompat.amp.amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampcompat.amp.block import scale_loss, step_was_skipped
from ampcompat.amp.checkpoint import load_state_dict, state_dict
from ampcompat.amp.frontend import initialize
from ampcompat.amp.handle import disable_casts
from ampcompat.amp.master_index import sync_masters
from ampcompat.amp.unwrap import unwrap

__all__ = [
    "__version__",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
    "step_was_skipped",
    "sync_masters",
    "unwrap",
]


def __getattr__(name: str) -> object:
    if name == "_DECORATOR_HANDLE":
        return getattr(_amp_state, "handle", None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
