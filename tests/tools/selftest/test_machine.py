"""``ampcompat test`` passes here, and fails on an installation that is broken; ``ampcompat env`` says what is there."""

import json
import multiprocessing
import os
import sys

import pytest
import torch
from amp_training import is_initialized

from ampcompat import _torch, amp
from ampcompat._distribution import SHIM
from ampcompat.amp import frontend
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.scaling import steps
from ampcompat.cli import main
from ampcompat.tools.selftest import checks, environment, ranks
from ampcompat.tools.selftest import run as run_module
from ampcompat.tools.selftest.checks import Failed, Skipped
from ampcompat.tools.selftest.run import Row, run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_stand_in_for_apex(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(SHIM)])


EVERY = [(check, level) for _, check, level in checks.each_check()]


@pytest.mark.parametrize(("check", "level"), EVERY, ids=[f"{check.__name__}-{level}" for check, level in EVERY])
def test_a_sound_installation_passes(check, level):
    assert check(CPU, level)
    assert not is_initialized()


# -- broken installations ----------------------------------------------------------------------------------------------
def nothing(*args, **kwargs):
    return None


def never_skips(monkeypatch):
    adjust = LossScaler.adjust
    monkeypatch.setattr(LossScaler, "adjust", lambda *args, **kwargs: nothing(adjust(*args, **kwargs)))


def skips_but_says_nothing(monkeypatch):
    monkeypatch.setattr(amp, "step_was_skipped", lambda optimizer: False)


def scale_stays(monkeypatch):
    monkeypatch.setattr(_torch, "updated_scale", lambda scale, passes, *args: (scale, passes))


def gradients_stay_scaled(monkeypatch):
    monkeypatch.setattr(LossScaler, "unscale_grads", nothing)


def no_casts(monkeypatch):
    monkeypatch.setattr(frontend, "begin_casts", nothing)


def no_weights_in_half(monkeypatch):
    monkeypatch.setattr("ampcompat.amp.frontend.cast_weights", nothing)


def scale_is_not_loaded(monkeypatch):
    monkeypatch.setattr(amp, "load_state_dict", nothing)


def model_is_not_loaded(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", nothing)


def optimizer_is_not_loaded(monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", nothing)


@pytest.mark.parametrize(
    ("breakage", "check", "level", "said"),
    [
        (no_casts, checks.check_ops, "O1", "linear gave float32, not float16"),
        (no_casts, checks.check_training, "O1", "from float32's"),
        (no_weights_in_half, checks.check_training, "O2", "weights are float32, not float16"),
        (gradients_stay_scaled, checks.check_training, "O1", "finite|from float32's"),
        (scale_is_not_loaded, checks.check_resume, "O1", "the loss scale is "),
        (scale_is_not_loaded, checks.check_resume, "O2", "the loss scale is "),
        (model_is_not_loaded, checks.check_resume, "O2", "from that of the uninterrupted training"),
        (optimizer_is_not_loaded, checks.check_resume, "O1", "from that of the uninterrupted training"),
        (never_skips, checks.check_overflow, "O1", "the step was made"),
        (skips_but_says_nothing, checks.check_overflow, "O2", "the step was made"),
        (scale_stays, checks.check_overflow, "O1", "the loss scale went from 65536 to 65536, not to 32768"),
    ],
)
def test_a_broken_installation_fails(monkeypatch, breakage, check, level, said):
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
        checks.check_overflow(CPU, "O1")


def test_a_device_without_autocast_is_skipped_at_o1(monkeypatch):
    monkeypatch.setattr(_torch, "autocast_device_types", lambda: ())
    with pytest.raises(Skipped, match="no autocast"):
        checks.check_ops(CPU, "O1")


# -- the rows ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def few(monkeypatch):
    """One check of each outcome, and no processes."""

    def passes(device, level):
        assert "AMPCOMPAT_OPT_LEVEL" not in os.environ
        return f"{device} at {level}"

    def fails(device, level):
        raise Failed("it is broken")

    def raises(device, level):
        raise KeyError("inside\nsecond line")

    def skips(device, level):
        raise Skipped("not here")

    each = [
        ("passes", passes, "O1"),
        ("fails", fails, "O2"),
        ("raises", raises, "O3"),
        ("skips", skips, "O1"),
    ]
    monkeypatch.setattr(checks, "each_check", lambda: iter(each))
    monkeypatch.setattr(ranks, "can_start", lambda kind: False)
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", "O0")


def test_each_outcome_has_a_row(few):
    """The checks run without the environment variables that set levels, which are restored afterwards."""
    rows = [(row.device, row.check, row.level, row.result, row.remark) for row in run(["cpu"])]
    assert rows == [
        ("cpu", "passes", "O1", "ok", "cpu at O1"),
        ("cpu", "fails", "O2", "FAIL", "it is broken"),
        ("cpu", "raises", "O3", "FAIL", r"KeyError: 'inside\nsecond line'"),
        ("cpu", "skips", "O1", "skip", "not here"),
        ("cpu", "ddp", "O1, O2", "skip", "needs 2 devices and their process group backend"),
    ]
    assert os.environ["AMPCOMPAT_OPT_LEVEL"] == "O0"


def test_a_failure_makes_the_status_1(few, capsys):
    assert main(["test", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "2 of 5 failed, 2 skipped" in out
    assert "\x1b" not in out
    assert main(["test", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert [row["result"] for row in found["checks"]] == ["ok", "FAIL", "FAIL", "skip", "skip"]


def test_without_a_failure_the_status_is_0(monkeypatch, capsys):
    monkeypatch.setattr(run_module, "run", lambda devices: [Row("cpu", "ops", "O1", "ok", "27 calls", 0.1)])
    assert main(["test"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, in 0 s"


def test_a_device_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["test", "--device", "cuda:99"])
    assert end.value.code == 2
    assert "--device cuda:99 - it is not there - devices: cpu" in capsys.readouterr().err


# -- two processes -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_two_processes_train_as_one():
    with ranks.started("cpu") as wait:
        assert wait() == "2 processes: equal weights, one overflow skipped by all"


@pytest.mark.slow
def test_a_rank_that_fails_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        "    from ampcompat.amp.scaler import LossScaler\n"
        "    LossScaler.unscale_grads = lambda *args, **kwargs: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with ranks.started("cpu") as wait, pytest.raises(Failed, match="Failed: O1: "):
        wait()


def test_ranks_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT", 0.1)
    with ranks.started("cpu") as wait, pytest.raises(Failed, match="no end within 0.1 s"):
        wait()
    assert multiprocessing.active_children() == []


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
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variables"] == {"AMPCOMPAT_DTYPE": "bf16"}


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
