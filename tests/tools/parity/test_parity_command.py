"""``ampcompat parity`` from its arguments to its exit status; most tests stand in for the processes it starts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parity_runs import run, step

from ampcompat.cli import main, parity
from ampcompat.tools.parity.runs import Run

HERE = Path(__file__).parent
SCRIPT = str(HERE / "script_of_many_kinds.py")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_comparison_from_end_to_end(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    line = [
        "parity",
        "--opt-level=O2",
        "--steps",
        "2",
        "--out",
        str(out),
        SCRIPT,
        "well",
        "--rtol",
        "9",
    ]
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "O2 fp16" in shown.out
    assert "within tolerance" in shown.out
    assert "FAIL" not in shown.out
    assert shown.err.splitlines()[0] == "O0: running"
    content = json.loads((out / "parity.json").read_text())
    assert content["target"] == [SCRIPT, "well", "--rtol", "9"]
    assert (content["rtol"], content["passed"]) == (0.1, True)
    o0, o2 = content["levels"]
    assert [len(level["steps"]) for level in (o0, o2)] == [2, 2]
    # The same weights and batches, but for the rounding to half.
    assert o2["steps"][0]["loss"] == pytest.approx(o0["steps"][0]["loss"], rel=5e-3)
    assert o2["steps"][0]["loss"] != o0["steps"][0]["loss"]
    assert 0 < o2["max_deviation"] < 0.1
    # Python, numpy and torch start from the same numbers, and the arguments are the script's.
    numbers = {re.search("numbers.*", (out / f"{name}.log").read_text())[0] for name in ("O0", "O2-fp16")}
    assert len(numbers) == 1
    assert numbers.pop().endswith("['--rtol', '9']")


@pytest.mark.rotate(5)
def test_a_script_that_is_not_repeatable_is_no_failure_of_a_level(capsys):
    """The script's runs differ before any step was made, at O0 too."""
    line = ["parity", "--opt-level=O1", "--steps", "2", "--rtol", "0", "--atol", "0", SCRIPT, "seeds from the clock"]
    assert main(line) == 1
    shown = capsys.readouterr()
    assert "FAIL" not in shown.out
    assert "next: " not in shown.out
    assert "not repeatable" in shown.out
    first, again = re.search(
        r"^Two runs of O0 differ before any step was made: the loss was (\S+), and then (\S+)\. What ", shown.out, re.M
    ).groups()
    assert first != again


@pytest.mark.rotate(3)
def test_a_script_of_torchrun_is_told_its_variables_and_runs_with_them(monkeypatch, capsys):
    line = ["parity", "--opt-level=O0", "--steps", "2", SCRIPT, "needs torchrun"]
    assert main(line) == 1
    shown = capsys.readouterr().out
    given = re.search(r"set those of torchrun, for one process: (.*) ampcompat parity", shown)[1]
    for word in given.split():
        monkeypatch.setenv(*word.split("="))
    assert main(line) == 0


def fake_runs(monkeypatch, **losses):
    """Stand in for the processes; a list of losses, or a run, per level."""
    started = []

    def run_level(level, options, folder, skips=(), on_step=None):
        started.append(level.name + (f" without {skips}" if skips else ""))
        made = losses[level.opt_level if not skips else "without"]
        made = made if isinstance(made, Run) else run(level.opt_level, made, level.dtype)
        made.log = str(folder / "log")
        lines = ["train.py:7: UserWarning: no scale_loss block", *(f"line {i}" for i in range(100))]
        Path(made.log).write_text("\n".join(lines) + "\n")
        return made

    monkeypatch.setattr(parity, "run_level", run_level)
    return started


def test_a_level_out_of_tolerance_makes_the_status_1(monkeypatch):
    fake_runs(monkeypatch, O0=[1.0, 1.0], O1=[1.0, 1.05], O2=[1.0, 2.0])
    assert main(["parity", "--opt-level", "O1", SCRIPT]) == 0
    assert main(["parity", SCRIPT]) == 1
    assert main(["parity", "--opt-level", "O2", "--rtol", "1", SCRIPT]) == 0
    assert main(["parity", "--opt-level", "O2", "--rtol", "0", "--atol=1", SCRIPT]) == 0


def test_a_crash_keeps_the_recorded_steps(monkeypatch, capsys, tmp_path):
    """The command shows the end of the script's output."""
    crashed = run("O1", [1.0], "float16", ending="crashed", message="crashed after 1 of 2 steps: KeyError: 1")
    started = fake_runs(monkeypatch, O0=[1.0, 1.0], O1=crashed, O2=[1.0, 1.0])
    assert main(["parity", "--opt-level", "O1,O2", "--out", str(tmp_path), SCRIPT]) == 1
    shown = capsys.readouterr()
    assert "crashed after 1 of 2 steps: KeyError: 1" in shown.out
    assert "  | line 99" in shown.err
    assert "  | line 80" not in shown.err
    assert started == ["O0", "O1 fp16", "O2 fp16"]
    assert len(json.loads((tmp_path / "parity.json").read_text())["levels"][1]["steps"]) == 1


def test_o3_runs_where_it_is_asked_for(monkeypatch):
    started = fake_runs(monkeypatch, O0=[1.0, 1.0], O1=[1.0, 1.0], O2=[1.0, 1.0], O3=[1.0, 2.0])
    assert main(["parity", SCRIPT]) == 0
    assert started == ["O0", "O1 fp16", "O2 fp16"]
    assert main(["parity", "--opt-level", "O3", SCRIPT]) == 1


def next_lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]


def test_the_next_command_is_for_the_level_that_failed(monkeypatch, capsys):
    nan = float("nan")
    fake_runs(monkeypatch, O0=[1.0, 1.0], O1=[1.0, 1.0], O2=[1.0, nan])
    assert main(["parity", "--dtype", "bf16", SCRIPT, "--name", "a b"]) == 1
    command = "ampcompat run --explain --opt-level O2 --dtype bf16"
    assert next_lines(capsys) == [f"next: {command} {SCRIPT} --name 'a b'"]


def test_a_level_that_skips_nearly_all_of_its_steps_is_explained(monkeypatch, capsys):
    made = run("O1", [4.0] * 20, "float16", skipped=True)
    made.steps[0] = step(1, 4.0)
    started = fake_runs(monkeypatch, O0=[4.0] * 20, O1=made)
    assert main(["parity", "--opt-level", "O1", SCRIPT]) == 1
    assert started == ["O0", "O1 fp16"]
    assert next_lines(capsys) == [f"next: ampcompat run --explain --opt-level O1 {SCRIPT}"]


def test_warnings_of_the_script_are_shown_once(monkeypatch, capsys):
    fake_runs(monkeypatch, O0=[1.0], O1=[1.0])
    assert main(["parity", "--opt-level", "O1", SCRIPT]) == 0
    assert capsys.readouterr().out.count("train.py:7: UserWarning: no scale_loss block") == 1


def test_a_loss_that_float32_does_not_hold_either_is_explained_at_o0(monkeypatch, capsys):
    """There it is said without what the levels add."""
    fake_runs(monkeypatch, O0=[1.0, float("inf")], O1=[1.0, float("inf")], O2=[1.0, 9.0])
    assert main(["parity", "--opt-level", "O1,O2", SCRIPT]) == 1
    assert next_lines(capsys) == [f"next: ampcompat run --explain --opt-level O0 {SCRIPT}"]


def test_a_level_that_skips_is_compared_with_an_o0_that_skips_the_same(monkeypatch, capsys):
    """The level's loss is out of tolerance only because of the updates that it lacks."""

    def skipping():
        made = run("O1", [4.0, 4.0, 3.0], "float16")
        made.steps[0] = step(1, 4.0, skipped=True)
        return made

    started = fake_runs(
        monkeypatch, O0=[4.0, 3.0, 2.0], O1=skipping(), O2=skipping(), without=run("O0", [4.0, 4.0, 3.0])
    )
    assert main(["parity", "--opt-level", "O1,O2", SCRIPT]) == 0
    assert started == ["O0", "O1 fp16", "O0 without (1,)", "O2 fp16"]
    assert "O0 without 1 step: running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "next_command"), [([SCRIPT], [f"next: ampcompat check {SCRIPT}"]), (["-m", "m"], [])]
)
def test_a_finite_deviation_of_a_file_is_one_for_check(monkeypatch, capsys, target, next_command):
    fake_runs(monkeypatch, O0=[1.0, 1.0], O1=[1.0, 2.0])
    assert main(["parity", "--opt-level", "O1", *target]) == 1
    assert next_lines(capsys) == next_command


def test_steps_are_counted_on_a_terminal(monkeypatch, capsys):
    def run_level(level, options, folder, skips=(), on_step=None):
        on_step(1)
        return run(level.opt_level, [1.0], level.dtype)

    monkeypatch.setattr(parity, "run_level", run_level)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["parity", "--opt-level", "O1", SCRIPT]) == 0
    assert "\r\x1b[KO1 fp16: step 1 of 20\r\x1b[KO1 fp16: 1 step, " in capsys.readouterr().err


def test_nothing_runs_after_an_o0_that_nothing_can_be_compared_with(monkeypatch, capsys):
    started = fake_runs(monkeypatch, O0=run("O0", [], ending="ended", message="the script never called amp.initialize"))
    assert main(["parity", SCRIPT]) == 1
    assert started == ["O0"]
    shown = capsys.readouterr()
    assert "the script never called amp.initialize" in shown.out
    assert "no other level runs" in shown.err


def test_an_interrupt_ends_the_comparison_with_what_there_is(monkeypatch, capsys, tmp_path):
    interrupted = run("O1", [1.0], "float16", ending="interrupted", message="interrupted after 1 of 2 steps")
    started = fake_runs(monkeypatch, O0=[1.0, 1.0], O1=interrupted)
    assert main(["parity", "--out", str(tmp_path), SCRIPT]) == 130
    assert started == ["O0", "O1 fp16"]
    assert "interrupted after 1 of 2 steps" in capsys.readouterr().out
    assert (tmp_path / "parity.json").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no script given"),
        (["--steps", "0", SCRIPT], "--steps 0 - it must be 1 or more - leave it out"),
        (["--rtol", "nan", SCRIPT], "--rtol nan - it must be 0 or more - leave it out"),
        (["--opt-level", "01", SCRIPT], "'01' is not an opt_level"),
        (["--dtype", "", SCRIPT], "empty list"),
        (["--out", SCRIPT, SCRIPT], "it is not a directory"),
        (["--no-such-option", SCRIPT], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(monkeypatch, capsys, options, said):
    started = fake_runs(monkeypatch)
    with pytest.raises(SystemExit) as exit:
        main(["parity", *options])
    assert exit.value.code == 2
    assert said in capsys.readouterr().err
    assert started == []


def test_a_script_that_is_not_there(monkeypatch, capsys):
    assert main(["parity", "no/such/script.py"]) == 2
    assert "can't open file" in capsys.readouterr().err


def test_the_command_itself_does_without_torch(tmp_path):
    code = "import sys, ampcompat.cli.parity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_interrupt_of_the_repetition_is_an_interrupt(monkeypatch, capsys):
    fake_runs(monkeypatch, O0=[1.0, 1.0], O1=[1.0, 2.0])
    run_level = parity.run_level

    def interrupted(level, options, folder, **kwargs):
        made = run_level(level, options, folder, **kwargs)
        made.ending = "interrupted" if options.steps == 1 else made.ending
        return made

    monkeypatch.setattr(parity, "run_level", interrupted)
    assert main(["parity", "--opt-level", "O1", SCRIPT]) == 130
