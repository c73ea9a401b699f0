"""Names private by underscore that scripts write: what each write does, and that it stays what it was under apex."""

import pytest
import torch
from core_kit import backward, masters, net, same, start, train
from internals import reset

from ampcompat import amp


def mm():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


# -- _amp_state.handle._is_active --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("level", "half"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_is_active_switches_casts_off_and_on_again(level, half):
    model, optimizer = start(level)
    handle, x = amp._amp_state.handle, torch.ones(4, 6)
    handle._is_active = False
    assert (handle.is_active(), handle._is_active) == (False, False)
    assert (model(x).dtype, mm()) == (torch.float32, torch.float32)
    train(model, optimizer, 1)
    handle._is_active = True
    assert (handle.is_active(), handle._is_active) == (True, True)
    assert (model(x).dtype, mm()) == (half, half)
    train(model, optimizer, 1)


def test_is_active_acts_at_once_inside_a_forward():
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            handle = amp._amp_state.handle
            seen.append(super().forward(x).dtype)
            handle._is_active = False
            seen.append(super().forward(x).dtype)
            handle._is_active = True
            return super().forward(x)

    model, _ = start("O1", model=Model(3, 3))
    assert model(torch.ones(2, 3)).dtype == torch.float16
    assert seen == [torch.float16, torch.float32]
    assert mm() == torch.float16


def test_is_active_waits_for_disable_casts_to_end():
    """``_is_active = True`` written inside ``disable_casts`` takes effect after it."""
    model, optimizer = start("O1")
    handle = amp._amp_state.handle
    handle._is_active = False
    with amp.disable_casts():
        handle._is_active = True
        assert mm() == torch.float32
    train(model, optimizer, 1)
    assert mm() == torch.float16


def test_is_active_after_deactivate_casts_again():
    model, _ = start("O1")
    handle = amp._amp_state.handle
    handle._deactivate()
    assert mm() == torch.float32
    handle._is_active = True
    assert (model(torch.ones(4, 6)).dtype, mm()) == (torch.float16, torch.float16)


def test_is_active_of_an_earlier_call():
    """It switches the casts of that call's models alone, not those of the code outside, which the latest call casts."""
    first, _ = start("O1")
    handle, x = amp._amp_state.handle, torch.ones(4, 6)
    second, _ = start("O1", model=net(1))
    handle._is_active = False
    assert (first(x).dtype, second(x).dtype, mm()) == (torch.float32, torch.float16, torch.float16)
    third, _ = start("O2", model=net(2))
    handle._is_active = True
    assert (first(x).dtype, third(x).dtype, mm()) == (torch.float16, torch.float32, torch.float16)


@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_is_active_of_init_s_handle():
    handle = amp.init()
    handle._is_active = False
    assert mm() == torch.float32
    handle._is_active = True
    assert mm() == torch.float16
    handle._is_active = False
    model, _ = start("O2")
    assert mm() == torch.float32
    handle = amp.init()
    assert mm() == torch.float16
    handle._is_active = False
    assert mm() == torch.float32


def test_is_active_does_nothing_where_nothing_is_cast():
    for level in ("O0", "O2", "O3"):
        _held = start(level, model=net(1))
        handle = amp._amp_state.handle
        for written in (True, False):
            handle._is_active = written
            assert handle._is_active is False
            assert mm() == torch.float32
    _held = start("O1")
    assert mm() == torch.float16


def test_is_active_of_a_handle_from_before_a_reset():
    _held = start("O1")
    handle = amp._amp_state.handle
    reset()
    for written in (False, True, False):
        handle._is_active = written
        assert mm() == torch.float32


# -- optimizer._amp_stash ----------------------------------------------------------------------------------------------
def started_with_gradients(level):
    """A model and its optimizer, and the gradients that amp makes of batch 1."""
    model, optimizer = start(level, loss_scale=128.0)
    backward(model, optimizer, 1)
    by_amp = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    return model, optimizer, by_amp


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scaled_gradients_that_a_script_has_unscaled_itself(level):
    """``params_have_scaled_gradients = False``: what is in ``p.grad`` is not divided again."""
    model, optimizer, by_amp = started_with_gradients(level)
    backward(model, optimizer, 1, delay_unscale=True)
    optimizer._amp_stash.params_have_scaled_gradients = False
    assert optimizer._amp_stash.params_have_scaled_gradients is False
    for param in model.parameters():
        param.grad.div_(128.0)
    if level == "O1":
        assert same([p.grad for p in amp.master_params(optimizer)], by_amp)
        before = masters(optimizer)
        optimizer.step()
        moved = [(b - a) for a, b in zip(masters(optimizer), before, strict=True)]
        # The difference of two weights of about 1 has the rounding error of a weight.
        assert all(torch.allclose(m, 0.1 * g, atol=1e-7) for m, g in zip(moved, by_amp, strict=True))
    optimizer.zero_grad()
    train(model, optimizer, 2)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dropped_scaled_gradients_do_not_come_back(level):
    """A script clears the gradients and writes ``params_have_scaled_gradients = False``."""
    model, optimizer = start(level)
    backward(model, optimizer, 1, times=float("inf"), delay_unscale=True)
    for param in model.parameters():
        param.grad = None
    optimizer._amp_stash.params_have_scaled_gradients = False
    backward(model, optimizer, 2)
    got = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    assert same(got, [p.grad for p in amp.master_params(optimizer)])
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def test_dropping_pending_gradients_keeps_earlier_ones():
    """``params_have_scaled_gradients = False`` drops the scaled ones; those unscaled before come back."""
    model, optimizer = start("O1", loss_scale=128.0)
    backward(model, optimizer, 1)
    one = [p.grad.clone() for p in model.parameters()]
    backward(model, optimizer, 2, delay_unscale=True)
    for param in model.parameters():
        param.grad = None
    optimizer._amp_stash.params_have_scaled_gradients = False
    assert same([p.grad for p in model.parameters()], one)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_already_patched_can_be_written_and_changes_no_step(level, written):
    model, optimizer = start(level)
    stash = optimizer._amp_stash
    stash.already_patched = written
    train(model, optimizer, 1)
    assert amp.step_was_skipped(optimizer) is False
    backward(model, optimizer, times=float("inf"))
    stash.already_patched = written
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True


def test_gradients_cannot_be_declared_scaled():
    """By what, only a block knows."""
    _, optimizer = start("O1")
    with pytest.raises(RuntimeError, match=r"params_have_scaled_gradients = True - .* - write `with amp.scale_loss"):
        optimizer._amp_stash.params_have_scaled_gradients = True


def test_lists_by_group_are_not_kept():
    _, optimizer = start("O2")
    for name in ("fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups"):
        assert not hasattr(optimizer._amp_stash, name)
