"""``python -m ampcompat.tools.recording.child JOURNAL STEPS SKIPS TARGET…``: run a script and record it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ampcompat.tools import script
from ampcompat.tools.core import observers
from ampcompat.tools.generators import seed_all
from ampcompat.tools.recording.journal import End, Journal
from ampcompat.tools.recording.recorder import Recorder
from ampcompat.tools.recording.skips import Skips


def main(argv: Sequence[str]) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    path, steps, skips, *target = argv
    children = _watch_for_children()
    seed_all()
    journal = Journal(path, int(steps))
    recorder = Recorder(journal.step, losses=True)
    observers().append(recorder)
    if skips:
        observers().append(Skips(recorder, {int(number) for number in skips.split(",")}))
    journal.write("ready")

    def seen() -> End:
        return {"unused": script.why_amp_is_unused(), "blocks": recorder.blocks, "children": children()}

    with journal.ending(seen):
        script.start(target, force=True)  # an installed apex would record nothing


def _watch_for_children() -> Callable[[], bool]:
    """A function that tells whether this process has started others since now."""
    started: list[str] = []

    def hook(event: str, _args: object) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.spawn"):
            started.append(event)

    sys.addaudithook(hook)
    return lambda: bool(started) or any(name.startswith("multiprocessing.popen_") for name in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1:])
