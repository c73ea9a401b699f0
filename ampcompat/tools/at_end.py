"""Call a function when this process ends, be it a script's or a worker of multiprocessing."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing import util


def at_end(function: Callable[[], object]) -> Callable[[], None]:
    """Call ``function`` once when this process ends; copies that it forks do not.

    Returns:
        A function that cancels this.
    """
    process = os.getpid()
    done = False

    def call() -> None:
        nonlocal done
        if done or os.getpid() != process:
            return
        done = True
        function()

    def cancel() -> None:
        nonlocal done
        done = True
        atexit.unregister(call)

    # Workers of multiprocessing run none of atexit's functions.
    atexit.register(call)
    util.Finalize(None, call, exitpriority=0)
    return cancel
