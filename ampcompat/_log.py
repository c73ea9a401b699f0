"""The one place that prints.

apex wrote its messages to standard output on rank 0, and people grep for them there.
"""

import os
import warnings

from ampcompat._state import state


def rank() -> int:
    """Rank of this process: that of ``torch.distributed`` once it is up, else the launcher's ``RANK``, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0  # no launcher wrote that


def say(message: str) -> None:
    """Print ``message`` on rank 0."""
    if rank() == 0:
        print(message, flush=True)  # noqa: T201 - the one print


def warn_once(key: str, message: str, stacklevel: int = 3) -> None:
    """Warn with ``message`` the first time that ``key`` comes up (until ``state.reset()``)."""
    if key not in state.warned:
        state.warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
