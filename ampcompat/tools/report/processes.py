"""Receipts of several processes: each leaves its facts in a folder, and the first adds them up.

They are those that a script starts, and the ranks that a launcher such as torchrun has started next to it.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

from ampcompat.tools.data import as_data, from_data
from ampcompat.tools.report.schema import Own, ProcessRow

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
    """Wait until the other ranks of this machine have left their last facts, or for :data:`PATIENCE`."""
    end, wanted = time.monotonic() + PATIENCE, int(os.environ["LOCAL_WORLD_SIZE"]) - 1
    while time.monotonic() < end and sum(one.process.ended for one in left(folder)) < wanted:
        time.sleep(0.05)


def leave(folder: str, facts: Own) -> None:
    """Write the facts of this process, in one piece, in the place of earlier ones."""
    write(Path(folder, f"{os.getpid()}.json"), json.dumps(as_data(facts)))


def write(path: Path, content: str) -> None:
    """Write ``content`` to ``path`` in one piece."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def left(folder: str | None) -> list[Own]:
    """The facts that were left in ``folder``, by rank."""
    if folder is None:
        return []
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.json"))]
    found = [from_data(Own, json.loads(text)) for text in texts]
    return sorted(found, key=lambda facts: (facts.process.rank, facts.process.pid))


def at_exit(action: Callable[[], None]) -> None:
    """Call ``action`` when this process ends by itself; workers of multiprocessing run none of atexit's functions."""
    atexit.register(action)
    util.Finalize(None, action, exitpriority=0)


def sentences(processes: list[ProcessRow]) -> list[str]:
    """Which processes the receipt adds up, and which left less than they should have."""
    found = []
    for one in processes:
        name = f"Process {one.pid} (rank {one.rank})"
        if one.error:
            found.append(f"{name} crashed: {one.error}")
        elif not one.ended and not one.traced_steps:
            found.append(
                f"{name} is missing: it called amp.initialize, and was killed, or still runs, before it counted."
            )
        elif not one.ended:
            found.append(f"{name} was killed, or still runs: its first {one.traced_steps} steps are counted, no more.")
    if len(processes) > 1:
        ranks = ", ".join(str(one.rank) for one in processes)
        found.insert(0, f"{len(processes)} processes trained (ranks {ranks}); their counts are added up.")
    return found
