"""``python -m ampcompat.tools.parity.child``: the process that runs the script at one level and records it.

Steps and the ending go to a file, a JSON line each, flushed at once: whatever happens to the process, what it did so
far is there to be read.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from ampcompat.tools.parity.record import End, Step, step_line, to_line

if TYPE_CHECKING:
    from ampcompat.tools.parity.recorder import Recorder


class EnoughSteps(SystemExit):
    """Leaves the script after the last step asked for, as ``sys.exit(0)`` would."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--skips", type=lambda text: [int(word) for word in text.split(",")], default=[])
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--")  # argparse would take a target's "-m" for an option of its own
    args, target = parser.parse_args(words[:at]), words[at + 1 :]

    from ampcompat.alias import install_as_apex
    from ampcompat.amp.observers import observers
    from ampcompat.cli import _script
    from ampcompat.tools.parity.recorder import Recorder
    from ampcompat.tools.parity.skips import Skips

    children = _watch_for_children()
    _seed(args.seed)
    install_as_apex(force=True)  # an installed apex would record nothing
    _script.hand_alias_to_children()
    with open(args.record, "a", encoding="utf-8") as file:
        writer = _Writer(file, args.steps)
        recorder = Recorder(writer)
        observers().append(recorder)
        if args.skips:
            observers().append(Skips(recorder, args.skips))
        error: BaseException | None = None
        _write(file, to_line("ready", {}))
        try:
            _script.run(target)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if os.getpid() == writer.process:
                _write(file, to_line("end", {**_ending(error), **_seen(recorder), "children": children()}))


class _Writer:
    """Writes steps to the record and ends the script after the last."""

    def __init__(self, file: TextIO, steps: int) -> None:
        self.file, self.steps, self.process = file, steps, os.getpid()
        self.forked = False

    def __call__(self, step: Step) -> None:
        if os.getpid() != self.process:
            # A forked copy trains: its steps are not those of the script.
            if not self.forked:
                _write(self.file, to_line("forked", {}))
            self.forked = True
            return
        if step.step <= self.steps:
            _write(self.file, step_line(step))
        # The exit of another thread would not end the script; the process that waits for this one ends it then.
        if step.step >= self.steps and threading.current_thread() is threading.main_thread():
            raise EnoughSteps(0)


def _write(file: TextIO, line: str) -> None:
    file.write(line)
    file.flush()


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _ending(error: BaseException | None) -> End:
    """How the script ended: the error in one line, or an exit status that is not zero."""
    if isinstance(error, SystemExit):
        code = error.code
        return {"error": None if code in (None, 0) else f"it exited with {code!r}"}
    if error is None:
        return {"error": None}
    return {"error": f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]}


def _seen(recorder: Recorder) -> End:
    """How far the script came in its use of amp."""
    from ampcompat._state import state

    session = state.session
    return {
        "initialized": session is not None,
        "enabled": session is not None and session.enabled,
        "blocks": recorder.blocks,
    }


def _watch_for_children() -> Callable[[], bool]:
    """A function that tells whether this process has started others since now."""
    started: list[str] = []

    def hook(event: str, _args: object) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.spawn"):
            started.append(event)

    sys.addaudithook(hook)
    return lambda: bool(started) or any(name.startswith("multiprocessing.popen_") for name in sys.modules)


if __name__ == "__main__":
    main()
