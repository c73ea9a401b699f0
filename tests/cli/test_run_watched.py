"""``ampcompat run --explain``, ``--report`` and ``--keep-fp32``."""

import json
import sys

import pytest
from python_process import run_python

#: A module that the scripts below import.
TRAINING = """
import torch

def train(steps, value=1.0):
    from apex import amp
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for _ in range(steps):
        with amp.scale_loss(model(torch.full((8, 8), value)).float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
"""
SCRIPT = """
import sys, torch
from apex import amp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for x in (torch.ones(2, 8), torch.full((2, 8), 1e6)):
    with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def ampcompat_run(tmp_path):
    """Run ``ampcompat run`` with the given words, in ``tmp_path``."""

    def start(*words, fresh=False, **variables):
        (tmp_path / "training.py").write_text(TRAINING)
        return run_python(["-m", "ampcompat", "run", *words], cwd=tmp_path, variables=variables, fresh=fresh)

    return start


@pytest.fixture
def run(tmp_path, ampcompat_run):
    def start(*options, status=0):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        return ampcompat_run(*options, script, status)

    return start


def test_all_options_at_once(tmp_path, run):
    """The exit status is the script's."""
    done = run("--explain", "--report=r.txt", "--keep-fp32", "1", status=3)
    assert done.returncode == 3, done.stderr
    assert "AMPCOMPAT_KEEP_FP32: '1' keeps 1 in float32." in done.stdout
    assert "float16 ends at 65504" in done.stderr
    assert "wrote the precision report to r.txt" in done.stdout
    assert "1 of 2 optimizer steps was skipped" in (tmp_path / "r.txt").read_text()


def test_a_report_that_cannot_be_written_is_printed(tmp_path, ampcompat_run):
    code = "import os, sys, training; training.train(1); os.mkdir('r.txt'); sys.exit(3)"
    done = ampcompat_run("--report=r.txt", "-c", code)
    assert done.returncode == 3
    assert done.stdout.startswith("precision report: opt_level O1")
    assert "The precision report could not be written to" in done.stdout.splitlines()[-1]


SPAWNS = """
import os, subprocess, sys
import torch.multiprocessing as mp
from training import train

def run_rank(rank):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
    train(2 + rank)

if __name__ == "__main__":
    if sys.argv[1] == "child":
        train(4)
    elif sys.argv[1] == "subprocess":
        subprocess.run([os.environ["PYTHON"], __file__, "child"], check=True)
    elif sys.argv[1] == "spawn":
        mp.spawn(run_rank, nprocs=2)
    elif os.fork() == 0:
        sys.exit()
    else:
        os.wait()
"""


@pytest.fixture
def start_children(tmp_path, ampcompat_run):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    return lambda option, how: ampcompat_run(option, "spawns.py", how, fresh=how == "spawn", PYTHON=sys.executable)


@pytest.mark.slow
def test_each_rank_that_a_script_spawns_writes_a_file_of_its_own(tmp_path, start_children):
    done = start_children("--report=r.json", "spawn")
    assert done.returncode == 0, done.stderr
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("r*.json")}
    steps = {name: (facts["rank"], facts["steps"], facts["half_flops_share"]) for name, facts in files.items()}
    assert steps == {"r.json": (0, 0, None), "r.rank0.json": (0, 2, 1.0), "r.rank1.json": (1, 3, 1.0)}
    assert files["r.json"]["initialized"] is False


@pytest.mark.rotate(2)
def test_a_process_that_a_script_starts_writes_a_file_of_its_own(tmp_path, start_children):
    done = start_children("--report=r.json", "subprocess")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("r.process*.json")
    assert json.loads(file.read_text())["steps"] == 4
    assert f"wrote the precision report to {file.name}" in done.stdout


def test_a_forked_copy_of_the_script_writes_no_report(start_children):
    assert start_children("--report", "fork").stdout.count("precision report:") == 1


def test_ranks_of_a_launcher_write_files_of_their_own(tmp_path, ampcompat_run):
    (tmp_path / "train.py").write_text("from training import train\ntrain(4)")
    done = ampcompat_run("--report=r.json", "train.py", RANK="1", WORLD_SIZE="4")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    facts = json.loads((tmp_path / "r.rank1.json").read_text())
    assert (facts["rank"], facts["world"]) == (1, 4)
    assert not (tmp_path / "r.json").exists()


CRASHES = """
from training import train
train(2)
raise KeyError("no such batch")
"""


def test_the_report_of_a_script_that_crashes_says_so(tmp_path, ampcompat_run):
    (tmp_path / "crashes.py").write_text(CRASHES)
    done = ampcompat_run("--report=r.json", "crashes.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'no such batch'"
    facts = json.loads((tmp_path / "r.json").read_text())
    assert (facts["steps"], facts["error"]) == (2, "KeyError: 'no such batch'")


def explained(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_explain_as_lines_of_json(run):
    done = run("--explain=json", status=3)
    assert done.returncode == 3
    assert "ampcompat explain" not in done.stdout + done.stderr
    fault, verdict = explained(done.stderr)
    assert (verdict["explain"], verdict["steps"], verdict["skipped"]) == ("verdict", 2, 1)
    assert (fault["op"], fault["step"], fault["pass"], fault["float32"]) == ("_to_copy", 2, "forward", 1e6)
    assert {"file", "line", "source", "see", "module", "inputs"} <= set(fault)


def test_explain_until_the_first_fault(run):
    done = run("--explain=first", status=3)
    assert done.returncode == 1  # the script's own 3 is never reached
    assert any("the script ends here, after 1 explanation" in line for line in done.stderr.splitlines())


@pytest.mark.parametrize("option", ["--explain", "--report"])
@pytest.mark.parametrize("asked", [{"AMPCOMPAT_EXPLAIN": "3"}, {"AMPCOMPAT_REPORT": "r.json"}])
def test_what_the_environment_asks_for_goes_with_an_option(tmp_path, ampcompat_run, asked, option):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ampcompat_run(option, "script.py", "3", fresh=True, **asked)
    assert done.returncode == 3, done.stderr
    assert ("ampcompat explain: 1 of 2 steps was skipped" in done.stderr) == ("explain" in option + str(asked).lower())


@pytest.mark.parametrize("asked", [{"AMPCOMPAT_EXPLAIN": "3"}, {"AMPCOMPAT_REPORT": "r.json"}])
def test_what_the_environment_asks_for_goes_with_parity(tmp_path, asked):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "ampcompat", "parity", "--opt-level=O1", "script.py", "0"]
    done = run_python(words, cwd=tmp_path, variables=asked, fresh=True)
    assert "O1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_last_line_of_explain_has_counts(run):
    done = run("--explain=5", status=3)
    assert done.stderr.splitlines()[-1].startswith("ampcompat explain: 1 of 2 steps was skipped; ")


def test_an_error_about_the_environment_has_no_line_of_ours(run, monkeypatch):
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", "O9")
    done = run()
    assert done.stderr.splitlines()[-1].startswith(
        "RuntimeError: AMPCOMPAT_OPT_LEVEL='O9' - it must be one of 'O0', 'O1'"
    )
    assert "ampcompat/amp" not in done.stderr


def test_a_pattern_that_matches_nothing_is_said(run):
    """Another model may have such a module."""
    done = run("--keep-fp32", "nosuch")
    assert "AMPCOMPAT_KEEP_FP32: 'nosuch' matches no module of this model" in done.stdout


# -- scripts that amp has nothing to do with ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "named"),
    [(["--opt-level", "O2"], "--opt-level"), (["--explain"], "--explain"), (["--dtype=bf16"], "--dtype"), ([], None)],
)
def test_options_without_effect_are_named(ampcompat_run, options, named):
    done = ampcompat_run(*options, "-c", "print('hello')")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    if named is None:
        assert done.stderr == ""
    else:
        said = f"ampcompat run: the script never called amp.initialize in this process, where {named} had no effect"
        assert done.stderr.startswith(said)


def test_amp_that_is_switched_off_has_no_effect_either(ampcompat_run):
    code = "import torch; from apex import amp; amp.initialize(torch.nn.Linear(2, 2), enabled=False, verbosity=0)"
    done = ampcompat_run("--explain", "-c", code)
    assert "the script called amp.initialize with enabled=False in this process" in done.stderr


def test_a_script_that_fails_has_the_last_word(ampcompat_run):
    done = ampcompat_run("--opt-level=O2", "-c", "1 / 0")
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
