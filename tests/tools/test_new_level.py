"""A new level is a row of ``LEVELS`` and nothing else: with a row more, amp and its tools know the level."""

import pytest
import torch
from amp_training import make_step

from ampcompat import amp
from ampcompat.amp.levels import LEVELS, Level
from ampcompat.testing import assert_opt_level_parity
from ampcompat.tools.parity.levels import read_levels
from ampcompat.tools.selftest.check import check

ROWS = {
    "O6": Level(
        brief="O6:  FP16 weights and norms, with FP32 masters.",
        cast_model_type=torch.half,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=False,
        master_weights=True,
        loss_scale=128.0,
    ),
    "O7": Level(
        brief="O7:  Casts of functions to BFLOAT16.",
        cast_model_type=None,
        patch_torch_functions=True,
        patch_torch_functions_type=torch.bfloat16,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale="dynamic",
    ),
    "O8": Level(
        brief="O8:  FP32 with a dynamic scale.",
        cast_model_type=torch.float32,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=None,
        master_weights=False,
        loss_scale="dynamic",
    ),
}
RUNS_IN = {"O6": torch.float16, "O7": torch.bfloat16, "O8": torch.float32}


@pytest.fixture(params=ROWS)
def level(request, monkeypatch):
    """A level that a row was added for."""
    for name, row in ROWS.items():
        monkeypatch.setitem(LEVELS, name, row)
    return request.param


def trained(level, times=1.0, **options):
    """A model after one step at ``level``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **{"opt_level": level, **options})
    make_step(optimizer, model(torch.randn(8, 4)).float().pow(2).mean() * times)
    return model, optimizer


def test_initialize_follows_the_row(level):
    ran = []
    model, optimizer = trained(level)
    model[0].register_forward_hook(lambda module, args, output: ran.append(output.dtype))
    model(torch.ones(8, 4))
    row = ROWS[level]
    assert ran == [RUNS_IN[level]]
    assert model[0].weight.dtype == (torch.float16 if level == "O6" else torch.float32)
    assert amp._amp_state.loss_scalers[0].dynamic is (row.loss_scale == "dynamic")
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}


def test_the_environment_asks_for_it(level, monkeypatch, capsys):
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", level)
    trained("O1")
    assert amp._amp_state.opt_properties.opt_level == level
    assert level in capsys.readouterr().out


def test_the_self_test_checks_it(level):
    assert "resumed with the same bits" in check(torch.device("cpu"), level)


def test_the_report_has_it(level):
    report = amp.report()
    trained(level)
    text = str(report)
    assert level in text
    assert (f"opt_level {level} is float32 throughout" in text) is (level == "O8")


def test_explanations_and_records_work_at_it(level, capsys):
    records = []
    handle = amp.on_step(records.append)
    amp.explain_overflows()
    trained(level, times=float("inf"))
    handle.flush()
    assert [(record.step, record.skipped) for record in records] == [(1, ROWS[level].loss_scale == "dynamic")]
    assert "ampcompat explain: " in capsys.readouterr().err


def test_parity_runs_it(level):
    names = [run.name for run in read_levels(f"O0,{level}", "float16,bfloat16")]
    assert (
        names
        == {
            "O6": ["O0", "O6 fp16", "O6 bf16"],
            "O7": ["O0", "O7"],
            "O8": ["O0", "O8"],
        }[level]
    )


def test_levels_are_compared_with_it(level):
    def train(opt_level):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            loss = model(torch.randn(8, 4)).float().pow(2).mean()
            make_step(optimizer, loss)
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert_opt_level_parity(train, levels=(level,))
