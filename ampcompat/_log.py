"""The one place that prints.

apex wrote its messages to standard output on rank 0, and people grep for them there.
"""

import contextlib
import os
import sys
import warnings
from types import FrameType

from ampcompat._state import state


def rank() -> int:
    """Rank of this process in ``torch.distributed``; before that is up, the launcher's ``RANK``, or 0 without one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or 0)


def say(message: str, error: bool = False, all_ranks: bool = False) -> None:
    """Print ``message`` on rank 0, or on all; to standard error if apex did not print the same line."""
    if all_ranks or rank() == 0:
        print(message, flush=True, file=sys.stderr if error else sys.stdout)


def say_once(key: str, message: str) -> None:
    """Print ``message``, on rank 0 to standard error, the first time that ``key`` comes up."""
    if key not in state.warned:
        state.warned.add(key)
        say(message, error=True)


def warn_once(key: str, message: str) -> None:
    """Warn with ``message``, at the script's line, the first time that ``key`` comes up (until ``state.reset()``)."""
    if key not in state.warned:
        state.warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=_level_of_script())


def _level_of_script() -> int:
    """How many frames above the caller the script is: the first frame outside of ampcompat, torch and contextlib.

    LR schedulers put frames of torch between the script and us, and other libraries ignore warnings from there.
    """
    import torch

    if torch.compiler.is_compiling():
        return 2
    folders = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        file = frame.f_code.co_filename
        is_of_the_script = not file.startswith(folders) and file != contextlib.__file__
        if is_of_the_script:
            break
        frame = frame.f_back
        level += 1
    return level
