"""Mixed precision as ``apex.amp`` offered it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Import the modules _amp_state and __version__ before the objects of the same names: a later import of either module
# then does not rebind the name to the module.
from ampcompat.amp import __version__ as _version_module  # noqa: F401 - see above
from ampcompat.amp import _amp_state as _amp_state_module  # noqa: F401 - see above

# Scripts say amp.scaler.LossScaler, amp._initialize.applier... without importing these.
from ampcompat.amp import _initialize, _process_optimizer, compat, lists, opt, rnn_compat, scaler, utils  # noqa: F401
from ampcompat.amp.__version__ import __version__
from ampcompat.amp._amp_state import _amp_state, master_params
from ampcompat.amp.amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampcompat.amp.casts.contexts import disable_casts
from ampcompat.amp.frontend import initialize
from ampcompat.amp.half.record import model_param, sync_masters
from ampcompat.amp.half.unwrap import unwrap
from ampcompat.amp.scaling.checkpoint import load_state_dict, state_dict
from ampcompat.amp.scaling.optimizer import step_was_skipped
from ampcompat.amp.scaling.scale_loss import scale_loss

if TYPE_CHECKING:
    from ampcompat.tools.explain import explain_overflows
    from ampcompat.tools.report import report
    from ampcompat.tools.scale_log import on_step

__all__ = ["__version__", "_amp_state", "bfloat16_function", "disable_casts", "explain_overflows", "float_function"]
__all__ += ["half_function", "init", "register_bfloat16_function"]
__all__ += ["initialize", "load_state_dict", "master_params", "model_param", "on_step", "promote_function"]
__all__ += ["register_float_function", "register_half_function", "register_promote_function", "report"]
__all__ += ["scale_loss", "state_dict", "step_was_skipped", "sync_masters", "unwrap"]


#: Tools that build on this package, by the module of ``ampcompat.tools`` that they are in: imported at their first use.
_TOOLS = {"explain_overflows": "explain", "on_step": "scale_log", "report": "report"}


def __getattr__(name: str) -> object:
    if name in _TOOLS:
        return getattr(importlib.import_module(f"ampcompat.tools.{_TOOLS[name]}"), name)
    if name == "_DECORATOR_HANDLE":
        return getattr(_amp_state, "handle", None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


# The environment may ask for these; ``ampcompat run --report`` does, for the processes that a script starts.
if "AMPCOMPAT_EXPLAIN" in os.environ:
    importlib.import_module("ampcompat.tools.explain").explain_as_asked()
if "AMPCOMPAT_REPORT" in os.environ:
    importlib.import_module("ampcompat.tools.report").report_as_asked()
