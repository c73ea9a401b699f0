"""Scripts that do what scripts do, each in a real process; several at once, to save time."""

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from parity_runs import step

from ampcompat.tools.parity import scripts
from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run
from ampcompat.tools.parity.scripts import Options, _describe, run_level, warnings_of
from ampcompat.tools.recording import process
from ampcompat.tools.recording.journal import read_step

SCRIPT = str(Path(__file__).with_name("script_of_many_kinds.py"))

# What a script does; steps recorded of the 3 asked for; ending; message.
ENDINGS = {
    "well": (3, "complete", ""),
    "never scales": (3, "complete", "no loss was seen: .* amp.scale_loss never"),
    "crashes": (2, "crashed", "crashed after 2 of 3 steps: KeyError: 'batch 2'"),
    "never initializes": (0, "ended", "the script never called amp.initialize$"),
    "forks": (0, "ended", "never called amp.initialize; it started other processes"),
    "spawns": (0, "ended", "never called amp.initialize; it started other processes"),
    "is killed": (2, "crashed", "ended by SIGKILL$"),
    "runs for ever": (1, "stalled", "no step for 1 s, ended after 1 of 3 steps$"),
    "will not leave": (3, "complete", ""),
}


def start(kind, folder):
    folder = folder / kind.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    options = Options([SCRIPT, kind, "--lr", "x"], 3, timeout=100)

    def lose_patience():
        """However busy the machine is, the script gets as far as its first step."""
        journal = folder / "O2-fp16.jsonl"
        while not journal.exists() or '"step"' not in journal.read_text():
            time.sleep(0.05)
        object.__setattr__(options, "timeout", 1)

    if kind == "runs for ever":
        threading.Thread(target=lose_patience, daemon=True).start()
    return run_level(Level("O2", "float16"), options, folder)


#: One process each: the others are left to the slow tests, and to those of the ending alone.
QUICK = ("crashes", "runs for ever")


def start_all(kinds, folder):
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("AMPCOMPAT_DTYPE", "bfloat16")  # the level's settings win over the shell's
        return dict(zip(kinds, pool.map(lambda kind: start(kind, folder), kinds), strict=True))


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory):
    return start_all(QUICK, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory):
    return start_all([kind for kind in ENDINGS if kind not in QUICK], tmp_path_factory.mktemp("slow_runs"))


@pytest.mark.parametrize("kind", QUICK)
def test_ending(quick_runs, kind):
    check(quick_runs[kind], *ENDINGS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ENDINGS if kind not in QUICK])
def test_ending_of_more(slow_runs, kind):
    check(slow_runs[kind], *ENDINGS[kind])


def check(run, steps, ending, message):
    assert (len(run.steps), run.ending) == (steps, ending), Path(run.log).read_text()
    assert re.search(message, run.message)
    assert bool(run.message) == bool(message)
    assert "\n" not in run.message


def test_steps_are_kept_with_their_numbers(quick_runs):
    assert [step.step for step in quick_runs["crashes"].steps] == [1, 2]
    assert all(step.loss and step.scales[0].scale == 128.0 for step in quick_runs["crashes"].steps)


def test_the_command_line_sets_the_level(quick_runs):
    """The script is not edited."""
    log = Path(quick_runs["crashes"].log).read_text()
    assert "AMPCOMPAT_OPT_LEVEL=O2 overrides the script's opt_level='O1'." in log
    assert "half dtype is torch.float16" in log


def test_the_log_has_the_traceback_of_a_crash(quick_runs):
    """It begins at the script."""
    log = Path(quick_runs["crashes"].log).read_text()
    assert "KeyError: 'batch 2'" in log
    assert "ampcompat/tools/" not in log


@pytest.mark.rotate(3)
def test_an_interrupt_keeps_the_recorded_steps(tmp_path, monkeypatch):
    """The script's process ends."""

    read = []

    def interrupt(content):
        if read:
            raise KeyboardInterrupt
        read.append(content)
        return read_step(content)

    monkeypatch.setattr(process, "GRACE_SECONDS", 5.0)
    monkeypatch.setattr(scripts, "read_step", interrupt)
    run = start("well", tmp_path)
    assert (run.ending, run.steps[0].step) == ("interrupted", 1)
    assert run.message.startswith("interrupted after")


@pytest.mark.rotate(3)
@pytest.mark.parametrize("word", ["-m", pytest.param("-c", marks=pytest.mark.slow)])
def test_a_module_or_code_in_the_place_of_a_script(tmp_path, monkeypatch, word):
    source = """
import sys, torch
from apex import amp
model = torch.nn.Linear(2, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
for _ in range(2):
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
assert sys.argv[1:] == ["--steps", "9"], sys.argv
"""
    (tmp_path / "trains.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    target = [word, "trains" if word == "-m" else source, "--steps", "9"]
    run = run_level(Level("O0"), Options(target, 3, timeout=100), tmp_path)
    assert (run.ending, len(run.steps)) == ("ended", 2), Path(run.log).read_text()


@pytest.mark.rotate(3)
def test_a_run_of_the_reference_skips_what_it_is_told(tmp_path):
    """Its log does not replace the log of the run without."""
    run = run_level(Level("O0"), Options([SCRIPT, "well"], 3, timeout=100), tmp_path, skips=(1, 3))
    assert run.skipped_steps == [1, 3], Path(run.log).read_text()
    assert Path(run.log).name == "O0-without-1-3.log"


def test_warnings_of_the_script_are_told_once(tmp_path):
    """Warnings for the user, such as amp's, are told; torch's own deprecations are not."""
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    told = "train.py:7: UserWarning: optimizer.step() with gradients, but no scale_loss block - write one."
    first.write_text(f"opt_level O1\n{told}\n  optimizer.step()\nx.py:1: FutureWarning: soon\n")
    second.write_text(f"{told}\n  optimizer.step()\ntrain.py:9: UserWarning: another\n")
    made = [Run(Level(name), log=str(log)) for name, log in (("O1", first), ("O2", second))]
    assert warnings_of(made) == [told, "train.py:9: UserWarning: another"]


# -- the ending alone --------------------------------------------------------------------------------------------------
STARTED = "it started other processes"


def end(unused="", blocks=3, error=None, children=False):
    return {"unused": unused, "blocks": blocks, "error": error, "children": children}


@pytest.mark.parametrize(
    ("losses", "ended", "code", "end", "ending", "message"),
    [
        ([1.0, 1.0], "", 0, end(), "complete", ""),
        ([1.0, 1.0], "stalled", None, {}, "complete", ""),  # did not leave by itself
        ([1.0, 1.0], "", 1, end(error="KeyError: 1"), "complete", ""),  # on its way out
        ([None, None], "", 0, end(), "complete", "no loss was seen"),
        ([1.0], "", 0, end(), "ended", "the script ended by itself after 1 of 2 steps"),
        ([1.0], "", 1, end(error="KeyError: 1"), "crashed", "crashed after 1 of 2 steps: KeyError: 1"),
        ([1.0], "", 0, end(error="it exited with 3"), "crashed", "it exited with 3"),
        ([], "", 7, {}, "crashed", "crashed after 0 of 2 steps: exit status 7"),
        ([], "", -9, {}, "crashed", "ended by SIGKILL"),
        ([], "", -40, {}, "crashed", "ended by signal 40"),  # a real-time signal, which has no name
        ([1.0], "stalled", None, {}, "stalled", "no step for 60 s, ended after 1 of 2 steps"),
        ([], "stalled", None, {}, "stalled", "raise --timeout if the script is just slow to start"),
        ([1.0], "interrupted", None, {}, "interrupted", "interrupted after 1 of 2 steps"),
        ([1.0, 1.0], "interrupted", None, {}, "interrupted", "interrupted after 2 of 2 steps"),  # at its very end
        ([], "", 0, end("the script never called amp.initialize"), "ended", "never called amp.initialize"),
        ([], "", 0, end("the script never called amp.initialize", children=True), "ended", STARTED),
        ([], "", 0, end(blocks=0), "ended", "neither amp.scale_loss nor optimizer.step()"),
        ([], "", 0, end(), "ended", "called amp.scale_loss 3 times and optimizer.step() never"),
    ],
)
def test_how_it_ended(losses, ended, code, end, ending, message):
    made = Run(Level("O1"), [step(number, loss) for number, loss in enumerate(losses, start=1)], ended)
    _describe(made, Options([], 2, timeout=60.0), code, end)
    assert made.ending == ending
    assert message in made.message
    assert bool(made.message) == bool(message)
