"""``python -m ampcompat.tools.recording.child``: run the script on ampcompat, in the place of apex, and record it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ampcompat.tools.recording.events import End, Step
from ampcompat.tools.recording.journal import APEX, Journal, Missing, read_words, seed_all

if TYPE_CHECKING:
    from ampcompat.tools.recording.recorder import Recorder


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    settings, target = read_words(sys.argv[1:] if argv is None else argv)

    from ampcompat.alias import install_as_apex
    from ampcompat.amp.observers import observers
    from ampcompat.cli import _script
    from ampcompat.tools.recording.recorder import Recorder
    from ampcompat.tools.recording.skips import Skips

    children = _watch_for_children()
    seed_all(settings.seed)
    if settings.no_apex:
        sys.meta_path.insert(0, Missing(APEX))
    else:
        install_as_apex(force=True)  # an installed apex would record nothing
        _script.hand_alias_to_children()
    journal = Journal(settings.journal, settings.steps)

    def on_step(step: Step) -> None:
        journal.step(**asdict(step))

    recorder = Recorder(on_step, journal.loss if settings.details else None)
    observers().append(recorder)
    if settings.skips:
        observers().append(Skips(recorder, settings.skips))
    if settings.details:
        journal.watch_modules()
    journal.write("ready")
    with journal.ending(lambda: {**_seen(recorder), "children": children()}):
        _script.run(target)


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
