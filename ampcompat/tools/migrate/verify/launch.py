"""One run in a process of its own, and what it recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict


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


#: What a run may import: the script as it was, one that was moved to ampcompat, one that needs neither.
Imports = Literal["apex", "ampcompat", "neither"]


def run(folder: Path, options: Options, record: Path, imports: Imports) -> Trace:
    """Run the script in ``folder``, where only the packages that ``imports`` names can be imported."""
    here = Path(__file__).parent
    numbers = [str(record), str(options.steps), str(options.seed)]
    if imports == "neither":
        command = [sys.executable, str(here / "after.py"), *numbers, *options.target]
    else:
        command = [sys.executable, "-m", "ampcompat.tools.migrate.verify.before", imports, *numbers, *options.target]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AMPCOMPAT_")}
    environment.update(PYTHONHASHSEED=str(options.seed % 2**32), PYTHONDONTWRITEBYTECODE="1")
    if imports != "neither":
        package = str(Path(__file__).resolve().parents[4])
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([package, known] if known else [package])
    record.write_text("")
    timed_out, code = False, 0
    with (record.with_suffix(".log")).open("wb") as output:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                timeout=options.timeout, check=False,
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            timed_out = True
    trace = _read(record)
    trace.output = "\n".join(record.with_suffix(".log").read_text("utf-8", "replace").splitlines()[-12:])
    if timed_out:
        trace.error = f"no end after {options.timeout:g} s"
    elif code and trace.error is None:
        trace.error = f"exit status {code}"
    return trace


class Line(TypedDict):
    """A line of a record: its kind, and what a line of that kind tells."""

    kind: str
    value: float | str
    scale: float | str
    dtype: str
    optimizer: int
    skipped: bool
    place: str
    module: str
    training: bool
    error: str | None


def _read(record: Path) -> Trace:
    trace = Trace()
    for line in record.read_text("utf-8").splitlines():
        content: Line = json.loads(line)
        kind = content["kind"]
        if kind == "loss":
            trace.losses.append((float(content["value"]), float(content["scale"]), content["dtype"], len(trace.steps)))
        elif kind == "step":
            trace.steps.append((content["optimizer"], content["skipped"]))
            trace.places.append(content["place"])
        elif kind == "dtype":
            trace.dtypes.setdefault((content["module"], content["training"]), set()).add(content["dtype"])
        else:
            trace.error = content["error"]
    return trace
