import pytest
from parity_runs import run

from ampcompat.tools.parity.ending import describe

STARTED = "it started other processes"


def end(initialized=True, enabled=True, blocks=3, error=None, children=False):
    return {"initialized": initialized, "enabled": enabled, "blocks": blocks, "error": error, "children": children}


@pytest.mark.parametrize(
    ("losses", "code", "notes", "ending", "message"),
    [
        ([1.0, 1.0], 0, {"end": end()}, "complete", ""),
        ([1.0, 1.0], None, {}, "complete", ""),  # did not leave by itself
        ([1.0, 1.0], 1, {"end": end(error="KeyError: 1")}, "complete", ""),  # on its way out
        ([None, None], 0, {"end": end()}, "complete", "no loss was seen"),
        ([1.0], 0, {"end": end()}, "ended", "the script ended by itself after 1 of 2 steps"),
        ([1.0], 1, {"end": end(error="KeyError: 1")}, "crashed", "crashed after 1 of 2 steps: KeyError: 1"),
        ([1.0], 0, {"end": end(error="it exited with 3")}, "crashed", "it exited with 3"),
        ([], 7, {}, "crashed", "crashed after 0 of 2 steps: exit status 7"),
        ([], -9, {}, "crashed", "ended by SIGKILL (out of memory?)"),
        ([], -11, {}, "crashed", "ended by SIGSEGV"),
        ([], -40, {}, "crashed", "ended by signal 40"),  # a real-time signal, which has no name
        ([1.0], None, {"stalled": True}, "stalled", "no step for 60 s, ended after 1 of 2 steps"),
        ([], None, {"stalled": True}, "stalled", "raise --timeout if the script is just slow to start"),
        ([1.0], None, {"interrupted": True}, "interrupted", "interrupted after 1 of 2 steps"),
        ([], 0, {"end": end(initialized=False, enabled=False)}, "ended", "never called amp.initialize"),
        ([], 0, {"end": end(initialized=False, enabled=False, children=True)}, "ended", STARTED),
        ([], 0, {"end": end(enabled=False)}, "ended", "enabled=False"),
        ([], 0, {"end": end(blocks=0)}, "ended", "neither amp.scale_loss nor optimizer.step()"),
        ([], 0, {"end": end()}, "ended", "called amp.scale_loss 3 times and optimizer.step() never"),
        ([], 0, {"end": end(initialized=False), "forked": {}}, "ended", "in the script's own process"),
    ],
)
def test_what_is_said(losses, code, notes, ending, message):
    got = describe(run("O1", losses), 2, 60.0, code, notes)
    assert got[0] == ending
    assert message in got[1]
    assert bool(got[1]) == bool(message)
