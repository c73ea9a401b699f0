"""Mixed precision as ``apex.amp`` offered it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Import the modules _amp_state and __version__ before the objects of the same names: a later import of either module
# then does not rebind the name to the module.
from ampcompat.amp import __version__ as _version_module  # noqa: F401 - see above
from ampcompat.amp import _amp_state as _amp_state_module  # noqa: F401 - see above

# Scripts say amp._initialize.applier, amp.lists.functional_overrides... without importing these.
from ampcompat.amp import _initialize, compat, lists, rnn_compat, utils, wrap  # noqa: F401
from ampcompat.amp.__version__ import __version__
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
from ampcompat.amp.amp_model import unwrap
from ampcompat.amp.autocast import disable_casts
from ampcompat.amp.block import scale_loss
from ampcompat.amp.checkpoint import load_state_dict, state_dict
from ampcompat.amp.frontend import initialize
from ampcompat.amp.masters import sync_masters
from ampcompat.amp.optimizer import step_was_skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampcompat.report import Receipt
    from ampcompat.scale_log import StepHandle, StepRecord

__all__ = ["__version__", "_amp_state", "disable_casts", "explain_overflows", "float_function", "half_function", "init"]
__all__ += ["initialize", "load_state_dict", "master_params", "on_step", "promote_function", "register_float_function"]
__all__ += ["register_half_function", "register_promote_function", "report", "scale_loss", "state_dict"]
__all__ += ["step_was_skipped", "sync_masters", "unwrap"]


def explain_overflows(limit: int = 3, *, stop: bool = False, json: bool = False, ranges: bool = False) -> None:
    """Explain lost steps from here on: the op, its module and line, and the cure, in one message each on stderr.

    apex had nothing like it; see :func:`ampcompat.explain.explain_overflows` for what it observes and what it costs.

    Args:
        limit: How many different faults to explain; the same fault is explained once.
        stop: End the script after the last of them.
        json: Write each as one JSON object on a line.
        ranges: Write the ranges of every layer, forward and backward, of the first step that is made and of each fault.

    Raises:
        ValueError: ``limit`` is not a positive integer.
    """
    from ampcompat import explain  # it builds on this package

    explain.explain_overflows(limit, stop=stop, json=json, ranges=ranges)


def on_step(callback: Callable[[StepRecord], object] | object) -> StepHandle:
    """Call ``callback`` with a small record after each optimizer step, until ``remove()`` of the handle returned.

    The record has ``step``, ``loss_id``, ``scale``, ``skipped`` and ``clean_passes``. No host sync is made for it. apex
    had nothing like it; see :func:`ampcompat.scale_log.on_step`.

    Args:
        callback: A function of one record; or an object to log to: a TensorBoard ``SummaryWriter``, or anything with
            ``log_metrics(dict, step=...)`` or ``log(dict)``.

    Returns:
        The handle: ``remove()`` ends it, ``flush()`` waits for records still on their way from the device; it is a
        context manager too.

    Raises:
        TypeError: ``callback`` is none of these.
    """
    from ampcompat import scale_log

    return scale_log.on_step(callback)


def report(steps: int = 3) -> Receipt:
    """Observe what runs from here on, and in which dtype: the precision receipt.

    apex had nothing like it; see :func:`ampcompat.report.report` for what it observes and what it costs.

    Args:
        steps: Optimizer steps whose ops are counted.

    Returns:
        The receipt: ``print(receipt)``, ``receipt.write("receipt.html")`` (or .json, .txt), ``receipt.facts()``.

    Raises:
        ValueError: ``steps`` is not a positive integer.
    """
    from ampcompat import report as reports

    return reports.report(steps)


def __getattr__(name: str) -> object:
    if name == "_DECORATOR_HANDLE":
        return getattr(_amp_state, "handle", None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


# ``ampcompat run --explain`` and ``--receipt`` set these, for the processes that a script starts.
if "AMPCOMPAT_EXPLAIN" in os.environ:
    importlib.import_module("ampcompat.explain").explain_as_asked()
if "AMPCOMPAT_RECEIPT" in os.environ:
    importlib.import_module("ampcompat.report").report_as_asked()
