"""Levels, overrides and the rules between them."""

import itertools
from dataclasses import replace

import pytest
import torch

from ampcompat import amp
from ampcompat.amp.frontend import Properties
from ampcompat.amp.levels import LEVELS
from ampcompat.amp.properties import read_properties

TABLE = {
    "O0": (torch.float32, False, None, None, False, 1.0),
    "O1": (None, True, torch.float16, None, None, "dynamic"),
    "O2": (torch.float16, False, None, True, True, "dynamic"),
    "O3": (torch.float16, False, None, False, False, 1.0),
    "O4": (None, True, torch.bfloat16, None, None, 1.0),
    "O5": (torch.bfloat16, False, None, True, True, 1.0),
}
NAMES = (
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
VALUES = {
    "cast_model_type": [torch.float16, torch.bfloat16, torch.float32, False],
    "patch_torch_functions": [True, False],
    "patch_torch_functions_type": [torch.float16, torch.bfloat16],
    "keep_batchnorm_fp32": [True, False, "True", "False"],
    "master_weights": [True, False],
    "loss_scale": ["dynamic", 128, 1.0, "64.0"],
}


def read(level, **overrides):
    return read_properties(level, dict.fromkeys(NAMES) | overrides)[0]


@pytest.mark.parametrize("level", TABLE)
def test_defaults_of_a_level(level):
    found = read(level)
    assert tuple(getattr(found, name) for name in NAMES) == TABLE[level]
    assert (found.enabled, found.opt_level) == (True, level)
    assert found.options == {"enabled": True, "opt_level": level, **dict(zip(NAMES, TABLE[level], strict=True))}


def allowed(level, name, value):
    """apex's rules, written out again."""
    if name == "patch_torch_functions_type":
        return value == {"O1": torch.float16, "O4": torch.bfloat16}.get(level)
    if level in ("O1", "O4"):
        if name == "cast_model_type":
            return value in (False, torch.float32)
        return name in ("patch_torch_functions", "loss_scale")
    return not (name == "patch_torch_functions" and value)


CASES = [(lv, name, value) for lv, name in itertools.product(TABLE, NAMES) for value in VALUES[name]]


@pytest.mark.parametrize(("level", "name", "value"), CASES)
def test_every_override_at_every_level(level, name, value):
    if not allowed(level, name, value):
        with pytest.raises(RuntimeError, match=name):
            read(level, **{name: value})
        return
    want = {"True": True, "False": False, "64.0": 64.0}.get(value, value) if isinstance(value, str) else value
    found = getattr(read(level, **{name: value}), name)
    assert found == want
    assert type(found) in (type(want), float)


@pytest.mark.parametrize("name", NAMES)
def test_initialize_takes_every_option_as_a_keyword(name):
    with pytest.raises((TypeError, ValueError), match=name):
        amp.initialize(torch.nn.Linear(1, 1), opt_level="O2", **{name: object()})


def test_bfloat16_needs_no_scaling_unless_asked_for():
    assert read("O2", cast_model_type=torch.bfloat16).loss_scale == 1.0
    assert read("O2", cast_model_type=torch.bfloat16, loss_scale="dynamic").loss_scale == "dynamic"


def test_properties_as_legacy_code_makes_them():
    made = Properties()
    assert made.enabled is False
    assert made.opt_level is None
    assert made.options["loss_scale"] is None
    made.enabled, made.opt_level = True, "O2"
    made.loss_scale = "128.0"
    assert made.loss_scale == made.options["loss_scale"] == 128.0
    with pytest.raises(AttributeError, match="no_such"):
        made.no_such  # noqa: B018


def test_environment_overrides_level_and_dtype(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setenv("AMPCOMPAT_OPT_LEVEL", "O2")
        patch.setenv("AMPCOMPAT_DTYPE", "bf16")
        found = read("O1", loss_scale=128.0)
        assert (found.opt_level, found.cast_model_type, found.loss_scale) == ("O2", torch.bfloat16, 128.0)
        patch.setenv("AMPCOMPAT_OPT_LEVEL", "O1")
        assert read("O2", master_weights=True).master_weights is None
        patch.setenv("AMPCOMPAT_DTYPE", "float8")
        with pytest.raises(ValueError, match=r"AMPCOMPAT_DTYPE='float8' - it must be one of .* - set"):
            read("O1")
    printed = capsys.readouterr().out
    assert "AMPCOMPAT_OPT_LEVEL=O2 overrides the script's opt_level='O1'." in printed
    assert "master_weights=True is not for this level and is dropped" in printed
    assert "AMPCOMPAT_DTYPE: the half dtype is torch.bfloat16." in printed


@pytest.mark.parametrize("value", [0, 0.0, "float16", torch.int8, torch.float64, torch.zeros(2), 1])
def test_cast_model_type_takes_dtypes_and_false_alone(value):
    with pytest.raises(TypeError, match="cast_model_type=.* - it must be torch.float16"):
        read("O2", cast_model_type=value)


# -- a level is a row --------------------------------------------------------------------------------------------------
def test_a_new_row_is_a_level(monkeypatch, capsys):
    """A half model in bfloat16, which no level is: the row alone says so, and it trains."""
    row = replace(LEVELS["O3"], brief="O6:  Pure BF16 training.", cast_model_type=torch.bfloat16)
    monkeypatch.setitem(LEVELS, "O6", row)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O6")
    assert "Selected optimization level O6:  Pure BF16 training." in capsys.readouterr().out
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    x = torch.randn(16, 4)
    losses = []
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_new_row_in_bfloat16_may_have_a_dynamic_scale(monkeypatch):
    row = replace(LEVELS["O5"], brief="O6:  O5 with a dynamic scale.", loss_scale="dynamic")
    monkeypatch.setitem(LEVELS, "O6", row)
    model, _ = amp.initialize(torch.nn.Linear(4, 4), opt_level="O6", verbosity=0), None
    assert model.weight.dtype == torch.bfloat16
    assert amp._amp_state.loss_scalers[0].dynamic


def test_what_a_new_row_with_casts_allows_follows_from_it(monkeypatch):
    row = replace(LEVELS["O4"], brief="O6:  Casts, with a dynamic scale.", loss_scale="dynamic")
    monkeypatch.setitem(LEVELS, "O6", row)
    with pytest.raises(RuntimeError, match=r"master_weights=True at O6 - .* opt_level='O5'"):
        read("O6", master_weights=True)
    with pytest.raises(RuntimeError, match=r"this level casts to torch.bfloat16 - select opt_level='O1'"):
        read("O6", patch_torch_functions_type=torch.float16)
    with pytest.raises(RuntimeError, match=r"casts no functions - select opt_level='O1' or 'O4' or 'O6' instead"):
        read("O2", patch_torch_functions=True)
    with pytest.raises(RuntimeError, match=r"options are 'O0', .*'O5', 'O6'"):
        read("O7")
    model = torch.nn.Linear(2, 2)
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O6", verbosity=0)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
