"""``ampcompat test`` passes here, and fails on an installation that is broken; ``ampcompat env`` says what is there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from internals import is_anything_initialized

from ampcompat import _torch, amp
from ampcompat._distribution import SHIM
from ampcompat.amp.levels import LEVELS
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.scaling import steps
from ampcompat.amp.scaling.found_inf import FoundInf
from ampcompat.cli import main
from ampcompat.tools.selftest import check as check_module
from ampcompat.tools.selftest import environment
from ampcompat.tools.selftest.check import Failed, Row, check, check_all

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_stand_in_for_apex(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(SHIM)])


@pytest.mark.parametrize("level", LEVELS)
def test_a_sound_installation_passes(level):
    assert "resumed with the same bits" in check(CPU, level)
    assert not is_anything_initialized()


# -- broken installations ----------------------------------------------------------------------------------------------
def nothing(*args, **kwargs):
    return None


def never_skips(monkeypatch):
    adjust = LossScaler.adjust
    monkeypatch.setattr(LossScaler, "adjust", lambda *args, **kwargs: nothing(adjust(*args, **kwargs)))


def skips_but_says_nothing(monkeypatch):
    monkeypatch.setattr(amp, "step_was_skipped", lambda optimizer: False)


def scale_stays(monkeypatch):
    monkeypatch.setattr(_torch, "update_scale_", nothing)


def gradients_stay_scaled(monkeypatch):
    monkeypatch.setattr(FoundInf, "multiply", nothing)


def no_casts(monkeypatch):
    monkeypatch.setattr("ampcompat.amp.session_objects.begin_casts", nothing)


def no_weights_in_half(monkeypatch):
    monkeypatch.setattr("ampcompat.amp.session_objects.cast_weights", nothing)


def scale_is_not_loaded(monkeypatch):
    monkeypatch.setattr(amp, "load_state_dict", nothing)


def model_is_not_loaded(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", nothing)


def optimizer_is_not_loaded(monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", nothing)


@pytest.mark.parametrize(
    ("breakage", "level", "said"),
    [
        (no_casts, "O1", "from float32's"),
        (no_weights_in_half, "O2", "weights are float32, not float16"),
        (gradients_stay_scaled, "O1", "finite|from float32's"),
        (scale_is_not_loaded, "O1", "the loss scale is "),
        (scale_is_not_loaded, "O2", "the loss scale is "),
        (model_is_not_loaded, "O2", "from that of the uninterrupted training"),
        (optimizer_is_not_loaded, "O1", "from that of the uninterrupted training"),
        (never_skips, "O1", "the step was made"),
        (skips_but_says_nothing, "O2", "the step was made"),
        (scale_stays, "O1", "the loss scale went from 65536 to 65536, not to 32768"),
    ],
)
def test_a_broken_installation_fails(monkeypatch, breakage, level, said):
    breakage(monkeypatch)
    with pytest.raises(Failed, match=said):
        check(CPU, level)


def test_a_step_that_is_skipped_and_made_all_the_same_fails(monkeypatch):
    real = steps.finish

    def finish(one, stash, skipped):
        if skipped:
            with torch.no_grad():
                for param in amp.master_params(one):
                    param.add_(1.0)
        real(one, stash, skipped)

    monkeypatch.setattr(steps, "finish", finish)
    with pytest.raises(Failed, match="changed the weights"):
        check(CPU, "O1")


# -- the rows ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def few(monkeypatch):
    """One check of each outcome."""

    def check(device, level):
        assert "AMPCOMPAT_OPT_LEVEL" not in os.environ
        if level == "O2":
            raise Failed("it is broken")
        if level == "O3":
            raise KeyError("inside\nsecond line")
        return f"{device} at {level}"

    monkeypatch.setattr(check_module, "check", check)
    monkeypatch.setattr(check_module, "LEVELS", ("O1", "O2", "O3"))
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", "O0")


def test_each_outcome_has_a_row(few):
    """The checks run without the environment variables that set levels, which are restored afterwards."""
    rows = [(row.device, row.level, row.passed, row.remark) for row in check_all(["cpu"])]
    assert rows == [
        ("cpu", "O1", True, "cpu at O1"),
        ("cpu", "O2", False, "it is broken"),
        ("cpu", "O3", False, r"KeyError: 'inside\nsecond line'"),
    ]
    assert os.environ["AMPCOMPAT_OPT_LEVEL"] == "O0"


def test_a_failure_makes_the_status_1(few, capsys):
    assert main(["test", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "2 of 3 failed" in out
    assert "\x1b" not in out


def test_without_a_failure_the_status_is_0(monkeypatch, capsys):
    monkeypatch.setattr(check_module, "check_all", lambda devices: [Row("cpu", "O1", True, "well", 0.1)])
    assert main(["test"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, in 0 s"


@pytest.mark.rotate(3)
def test_ctrl_c_ends_it_with_one_line(tmp_path):
    """Signals of a terminal reach every process of the group: none but this one is there to say anything."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ampcompat", "test", "--device", "cpu"]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in a shell's background ignore it, and so would this
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    signal.signal(signal.SIGINT, before)
    for line in process.stdout:
        if line.startswith("cpu "):
            break
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "ampcompat test: interrupted\n")


def test_a_device_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["test", "--device", "cuda:99"])
    assert end.value.code == 2
    assert "--device cuda:99 - it is not there - devices: cpu" in capsys.readouterr().err


# -- env ---------------------------------------------------------------------------------------------------------------
def test_what_a_bug_report_needs(monkeypatch, capsys):
    monkeypatch.setenv("AMPCOMPAT_DTYPE", "bf16")
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert lines["torch"].startswith(f"{torch.__version__} (")
    assert lines["devices"].startswith("cpu: ")
    assert "float16" in lines["devices"]
    assert lines["variables"] == "AMPCOMPAT_DTYPE=bf16"
    assert lines["apex"] == "not installed"


@pytest.mark.parametrize("amp_too", [False, True])
def test_an_installed_apex_is_named(monkeypatch, tmp_path, amp_too):
    (tmp_path / "apex" / "amp").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    if amp_too:
        (tmp_path / "apex" / "amp" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = f"of unknown version, with amp, at {tmp_path / 'apex'}" if amp_too else "of unknown version, without amp"
    assert environment.environment()["apex"] == expected


def test_a_torch_that_cannot_be_imported_is_a_fact_too(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["env"]) == 1
    assert "torch      cannot be imported: ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((9, 0), "float16 fast, bfloat16 fast"),
        ((7, 5), "float16 fast, bfloat16 slow"),
        ((6, 1), "float16 slow, bfloat16 slow"),
    ],
)
def test_a_cuda_device_by_its_capability(monkeypatch, capability, said):
    class Properties:
        name, total_memory, (major, minor) = "NVIDIA X", 80 * 2**30, capability

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert (
        environment.describe_device("cuda:0") == f"NVIDIA X, 80 GiB, capability {capability[0]}.{capability[1]}; {said}"
    )
