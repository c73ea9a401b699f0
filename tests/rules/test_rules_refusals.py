"""What is refused in half, and how that is said."""

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on

from ampcompat._state import state
from ampcompat.amp import rules
from ampcompat.amp.lists import functional_overrides

P = torch.tensor([0.2, 0.7])
T = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("which", ["input", "target", "weight"])
def test_binary_cross_entropy_refuses_half_and_names_both_fixes(which, half):
    arguments = {"input": P, "target": T, "weight": torch.ones(2)}
    arguments[which] = arguments[which].to(half)
    with casts_on(), pytest.raises(NotImplementedError) as refused:
        F.binary_cross_entropy(**arguments)
    assert "BCEWithLogits" in str(refused.value)
    assert "register_float_function(torch, 'sigmoid')" in str(refused.value)


def test_binary_cross_entropy_runs_in_float32():
    plain = F.binary_cross_entropy(P, T)
    with casts_on():
        assert torch.equal(torch.nn.BCELoss()(P, T), plain)


def test_binary_cross_entropy_runs_in_half_where_casts_are_off():
    with casts_on(), torch.autocast("cpu", enabled=False):
        assert F.binary_cross_entropy(P.half(), T.half()).dtype is torch.float16


def test_allowed_banned_ops_run_in_float32():
    state.rules.allow_banned = True
    with casts_on():
        assert F.binary_cross_entropy(P.half(), T.half()).dtype is torch.float32
        state.rules.allow_banned = False
        with pytest.raises(NotImplementedError):
            F.binary_cross_entropy(P.half(), T)


def test_reset_bans_again():
    state.rules.allow_banned = True
    state.reset()
    assert not state.rules.allow_banned


@pytest.mark.parametrize("function", [F.silu, F.mish, F.elu])
def test_functions_put_on_the_float_list_refuse_half_in_place_though_no_method_does(function, monkeypatch):
    monkeypatch.setattr(functional_overrides, "FP32_FUNCS", [*functional_overrides.FP32_FUNCS, function.__name__])
    x = torch.full((2, 2), 0.5).half()
    with casts_on():
        with pytest.raises(NotImplementedError, match=rf"x = torch\.nn\.functional\.{function.__name__}\(x\)"):
            function(x, inplace=True)
        assert x.eq(0.5).all()
        assert function(x.float(), inplace=True).dtype is torch.float32
        assert function(x).dtype is torch.float32


REFUSED = sorted(name for name, rule in rules.rules_by_name().items() if rule is rules.Rule.INPLACE_BANNED)


@pytest.mark.parametrize("name", REFUSED)
def test_in_place_float_ops_refuse_half_name_the_fix_and_change_nothing(name):
    arguments = {"pow_": (2,), "cumprod_": (0,), "cumsum_": (0,), "renorm_": (2, 0, 1.0)}.get(name, ())
    x = torch.full((2, 2), 0.5).half()
    with casts_on():
        with pytest.raises(NotImplementedError, match=rf"In-place {name}.*x = x\.{name[:-1]}\(") as refused:
            getattr(x, name)(*arguments)
        assert "float16" in str(refused.value)
        assert x.eq(0.5).all()
        wide = x.float()
        assert getattr(wide, name)(*arguments) is wide


def test_an_in_place_power_of_two_dtypes_keeps_float32():
    with casts_on():
        assert torch.full((2,), 3.0).pow_(torch.full((2,), 2.0).half()).tolist() == [9.0, 9.0]
