"""Receipts of the processes that a script starts: each leaves its facts in a folder, and the first adds them up."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

#: Names the folder, for the processes that inherit it.
VARIABLE = "AMPCOMPAT_RECEIPT"


def leave(folder: str, facts: dict[str, Any]) -> None:
    """Write the facts of this process, in one piece, in the place of earlier ones."""
    write(Path(folder, f"{os.getpid()}.json"), json.dumps(facts))


def write(path: Path, content: str) -> None:
    """Write ``content`` to ``path`` in one piece."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def left(folder: str | None) -> list[dict[str, Any]]:
    """The facts that were left in ``folder``, by rank."""
    if folder is None:
        return []
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    return sorted(found, key=lambda facts: (facts["process"]["rank"], facts["process"]["pid"]))


def at_exit(action: Callable[[], None]) -> None:
    """Call ``action`` when this process ends by itself; workers of multiprocessing run none of atexit's functions."""
    atexit.register(action)
    util.Finalize(None, action, exitpriority=0)


def table_rows(facts: dict[str, Any]) -> list[list[str]]:
    """A row for each process that trained, where there are several."""
    rows = []
    for one in facts["processes"]:
        share = "" if one["half_flops_share"] is None else f"{100 * one['half_flops_share']:.1f} %"
        ended = one["error"] or ("" if one["ended"] else "did not end by itself")
        counts = [str(one[name]) for name in ("traced_steps", "steps", "skipped")]
        rows.append([str(one["rank"]), str(one["pid"]), share, *counts, ended])
    return rows


COLUMNS = ["rank", "process", "in half", "traced", "steps", "skipped", "ending"]


def sentences(processes: list[dict[str, Any]]) -> list[str]:
    """Which processes the receipt adds up, and which left less than they should have."""
    found = []
    for one in processes:
        name = f"Process {one['pid']} (rank {one['rank']})"
        if one["error"]:
            found.append(f"{name} crashed: {one['error']}")
        elif not one["ended"] and not one["traced_steps"]:
            found.append(
                f"{name} is missing: it called amp.initialize, and was killed, or still runs, before it counted."
            )
        elif not one["ended"]:
            found.append(
                f"{name} was killed, or still runs: its first {one['traced_steps']} steps are counted, no more."
            )
    if len(processes) > 1:
        ranks = ", ".join(str(one["rank"]) for one in processes)
        found.insert(0, f"{len(processes)} processes trained (ranks {ranks}); their counts are added up.")
    return found
