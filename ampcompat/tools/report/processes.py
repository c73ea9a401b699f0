"""Receipts of several processes: each leaves its record in a folder, and the first adds them up.

They are those that a script starts, and the ranks that a launcher such as torchrun has started next to it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

from ampcompat.tools.report.record import Record

#: Names the folder, for the processes that inherit it.
VARIABLE = "AMPCOMPAT_RECEIPT"
#: Seconds that rank 0 gives the others to end after it.
PATIENCE = 10.0


def folder_of_ranks() -> str | None:
    """The folder that the ranks of torchrun on the machine of rank 0 share; None elsewhere, and without torchrun."""
    words = [os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE")]
    if not all(word.isdecimal() for word in words) or words[2] == "1" or os.environ.get("GROUP_RANK") != "0":
        return None
    # The launcher is the parent of all of them; it may start them anew, with another count.
    folder = Path(tempfile.gettempdir(), f"ampcompat-receipt-{os.getppid()}-{words[0]}-{words[1]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    ours = not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid()
    return str(folder) if ours and not folder.is_symlink() else None


def wait_for_ranks(folder: str) -> None:
    """Wait until the other ranks of this machine have left their last record, or for :data:`PATIENCE`."""
    end, wanted = time.monotonic() + PATIENCE, int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    while time.monotonic() < end and sum(one.process.ended for one in left(folder)) < wanted:
        time.sleep(0.05)


def leave(folder: str, record: Record) -> None:
    """Write the record of this process, in one piece, in the place of earlier ones."""
    write(Path(folder, f"{os.getpid()}.pickle"), pickle.dumps(record))


def write(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` in one piece."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def left(folder: str | None) -> list[Record]:
    """The records that were left in ``folder``, which is the user's own, by rank."""
    if folder is None:
        return []
    found: list[Record] = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.pickle")]
    return sorted(found, key=lambda record: (record.process.rank, record.process.pid))


def at_exit(action: Callable[[], None]) -> None:
    """Call ``action`` when this process ends by itself; workers of multiprocessing run none of atexit's functions."""
    atexit.register(action)
    util.Finalize(None, action, exitpriority=0)
