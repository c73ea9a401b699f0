"""``docs/examples/run_levels.py``, which runs a script at every level and shows a table."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def run_levels(examples):
    import run_levels

    return run_levels


def result(level, accuracy):
    return {
        "opt_level": level,
        "accuracy": accuracy,
        "steps": 360,
        "skipped_steps": 1,
        "loss_scale": 32768.0,
        "seconds": 2.34,
        "weights": "float32",
    }


@pytest.mark.parametrize(
    ("accuracies", "problem"),
    [
        ({"O0": 98.0, "O1": 98.5, "O2": 98.2}, ""),
        ({"O0": 98.0, "O1": 98.6, "O2": 98.2}, "O0, O1 and O2 are 0.60 points apart"),
        ({"O0": 97.0, "O1": 96.9, "O2": 97.0}, "below 97 %: O1"),
        ({"O0": 98.0, "O1": float("nan"), "O2": 98.0}, "below 97 %: O1"),
        ({"O0": 98.0, "O1": 98.0, "O2": 98.0, "O3": 10.0}, ""),
        ({"O3": 10.0}, ""),
    ],
)
def test_verdict(run_levels, accuracies, problem):
    assert run_levels.verdict([result(level, accuracy) for level, accuracy in accuracies.items()]) == problem


def test_table(run_levels):
    lines = run_levels.table([run_levels.row(result("O1", 98.5))]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["opt_level", "test accuracy", "steps", "skipped", "final scale", "seconds", "weights"]
    assert cells[2] == ["O1", "98.50 %", "360", "1", "32768", "2.3", "float32"]
    assert len({len(line) for line in lines}) == 1


def command_of(monkeypatch, run_levels, code, argv):
    """What ``main`` starts for each level, with a script that ends with ``code``."""
    started = []

    def start(command, stdout=None, stderr=None):
        started.append(command)
        if not code:
            path = command[command.index("--result") + 1]
            with open(path, "w") as file:
                json.dump(result(command[command.index("--opt-level") + 1], 98.0), file)
        return subprocess.CompletedProcess(command, code, b"what the script said\n" if stdout else None)

    monkeypatch.setattr(run_levels.subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["run_levels.py", *argv])
    return started


def test_each_level_is_run_by_ampcompat_run(monkeypatch, run_levels, capsys):
    started = command_of(monkeypatch, run_levels, 0, ["--epochs", "3"])
    run_levels.main()
    assert [c[c.index("--opt-level") + 1] for c in started] == ["O0", "O1", "O2", "O3"]
    assert all(c[:4] == [sys.executable, "-m", "ampcompat", "run"] and c[-2:] == ["--epochs", "3"] for c in started)
    shown = capsys.readouterr().out
    assert shown.count("98.00 %") == 4
    assert "what the script said" not in shown


def test_verbose_lets_the_script_print(monkeypatch, run_levels, capsys):
    command_of(monkeypatch, run_levels, 3, ["--opt-levels", "O2", "--verbose"])
    with pytest.raises(SystemExit):
        run_levels.main()
    assert capsys.readouterr().err == "O2: the script ended with status 3\n"


def test_a_level_that_fails_fails_the_run(monkeypatch, run_levels, capsys):
    command_of(monkeypatch, run_levels, 3, ["--opt-levels", "O2"])
    with pytest.raises(SystemExit) as stopped:
        run_levels.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "what the script said\nO2: the script ended with status 3\n"
