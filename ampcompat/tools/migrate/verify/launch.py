"""One run of the script, in a copy of its directory, and what it recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.recording import process
from ampcompat.tools.recording.journal import Settings

#: Lines of a run's output that are kept.
LAST_LINES = 12


@dataclass(frozen=True)
class Options:
    """Hold the settings common to both runs.

    Attributes:
        target: ``[script, args…]`` or ``["-m", module, args…]``, relative to the migrated directory.
        steps: Optimizer steps after which a run is ended.
        seed: Of Python, numpy and torch.
        timeout: Seconds after which a run is ended.
    """

    target: Sequence[str]
    steps: int = 20
    seed: int = 0
    timeout: float = 600.0


@dataclass
class Trace:
    """Hold what a run did.

    Attributes:
        losses: Value, scale and dtype of each loss that was scaled, in order, and the steps made before it.
        steps: Number of the optimizer and whether the step was skipped.
        places: Where the script made each step, ``train.py:12``; ``""`` where it is not known.
        dtypes: What modules with weights returned, by kind and mode: ``("Linear", training)``.
        error: Why it ended early, or None.
        output: The last lines that it printed.
    """

    losses: list[tuple[float, float, str, int]] = field(default_factory=list)
    steps: list[tuple[int, bool]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    dtypes: dict[tuple[str, bool], set[str]] = field(default_factory=dict)
    error: str | None = None
    output: str = ""

    def on_line(self, kind: str, content: Any) -> None:
        """Add what a line of the journal tells."""
        if kind == "loss":
            dtype = dtype_name(content["dtype"])
            self.losses.append((content["value"], content["scale"], dtype, len(self.steps)))
        elif kind == "step":
            self.steps.append((content["optimizer"], content["skipped"]))
            self.places.append(content["place"])
        elif kind == "dtype":
            returned = self.dtypes.setdefault((content["module"], content["training"]), set())
            returned.add(dtype_name(content["dtype"]))
        elif kind == "end":
            self.error = content["error"]


#: What a run may import: the script as it was, one that was moved to ampcompat, one that needs neither.
Imports = Literal["apex", "ampcompat", "neither"]


def run(folder: Path, options: Options, record: Path, imports: Imports) -> Trace:
    """Run the script in ``folder``, where only the packages that ``imports`` names can be imported."""
    trace = Trace()
    ends_at = time.monotonic() + options.timeout
    timed_out = False

    def must_end(waited: float) -> bool:
        nonlocal timed_out
        if len(trace.steps) >= options.steps and waited > process.GRACE_SECONDS:
            return True
        timed_out = time.monotonic() > ends_at
        return timed_out

    settings = Settings(str(record), options.steps, options.seed, details=True, no_apex=imports != "apex")
    command = process.command(settings, options.target, native=imports == "neither")
    log = record.with_suffix(".log")
    code = process.follow(command, _environment(options, imports), record, log, trace.on_line, must_end, folder)
    trace.output = "\n".join(log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:])
    if timed_out:
        trace.error = f"no end after {options.timeout:g} s"
    elif code and trace.error is None:
        trace.error = f"exit status {code}"
    return trace


def _environment(options: Options, imports: Imports) -> dict[str, str]:
    variables = process.environment(options.seed, without=lambda name: name.startswith("AMPCOMPAT_"))
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    if imports != "neither":
        package = str(Path(__file__).resolve().parents[4])
        paths = [package, *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables
