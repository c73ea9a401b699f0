"""A script's own ``optimizer._prepare_amp_backward`` and ``_post_amp_backward``: called where apex called them."""

import types

import pytest
import torch
from core_kit import backward, loss_of, net, same, start

from ampcompat import amp

LEVELS = ["O1", "O2", "O3"]


def gradients(optimizer):
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]


def by_apex_alone(level, blocks=2):
    """The gradients of some blocks where nothing was replaced."""
    model, optimizer = start(level, loss_scale=128.0)
    for seed in range(blocks):
        backward(model, optimizer, seed)
    return gradients(optimizer)


def told_of(optimizer, name, calls):
    """Replace a method by one that notes its arguments and goes on with the original."""
    original = getattr(optimizer, name)

    def method(self, *args):
        assert self is optimizer
        calls.append((name, *args))
        return original(*args)

    setattr(optimizer, name, types.MethodType(method, optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_both_are_called_once_for_each_block(level):
    model, optimizer = start(level, loss_scale=128.0)
    calls = []
    for name in ("_prepare_amp_backward", "_post_amp_backward"):
        told_of(optimizer, name, calls)
    for seed in range(2):
        backward(model, optimizer, seed)
    scaler = amp._amp_state.loss_scalers[0]
    assert calls == [("_prepare_amp_backward",), ("_post_amp_backward", scaler)] * 2
    assert same(gradients(optimizer), by_apex_alone(level))


def test_neither_is_called_at_a_scale_of_one_without_masters():
    calls = []
    model, optimizer = start("O0")
    for name in ("_prepare_amp_backward", "_post_amp_backward"):
        told_of(optimizer, name, calls)
    backward(model, optimizer)
    assert calls == []


def test_both_are_called_in_a_delayed_block():
    """It unscales, as every block does; apex called them for the last block alone."""
    calls = []
    model, optimizer = start("O1")
    for name in ("_prepare_amp_backward", "_post_amp_backward"):
        told_of(optimizer, name, calls)
    backward(model, optimizer, delay_unscale=True)
    assert [call[0] for call in calls] == ["_prepare_amp_backward", "_post_amp_backward"]


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_that_the_scripts_own_finds_skips_the_step(level):
    model, optimizer = start(level, loss_scale="dynamic")
    told_of(optimizer, "_post_amp_backward", [])
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    backward(model, optimizer, times=float("inf"))
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale / 2


def unscale_by_hand(self, scaler):
    """As ``onnxruntime``'s, which does by kernels of its own what apex did."""
    self.calls = getattr(self, "calls", 0) + 1
    stash, scale = self._amp_stash, scaler.loss_scale()
    if hasattr(stash, "all_fp32_from_fp16_params"):
        for half, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
            if half.grad is not None:
                new = half.grad.float() / scale
                master.grad = new if master.grad is None else master.grad + new
        params, aside = stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash
    else:
        params, aside = stash.all_fp32_params, stash.all_fp32_grad_stash
    for param, old in zip(params, aside, strict=True):
        if param.grad is not None:
            param.grad.div_(scale)
            if old is not None:
                param.grad.add_(old)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_it_unscales_is_unscaled_once(level):
    model, optimizer = start(level, loss_scale=128.0)
    optimizer._post_amp_backward = types.MethodType(unscale_by_hand, optimizer)
    for seed in range(2):
        backward(model, optimizer, seed)
    assert optimizer.calls == 2
    assert same(gradients(optimizer), by_apex_alone(level))
    model.zero_grad()  # is noticed as after any block
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer.step()
    assert same(before, list(amp.master_params(optimizer)))


def test_gradients_aside_that_it_does_not_ask_for_are_added():
    model, optimizer = start("O1", loss_scale=128.0)

    def divide(self, scaler):
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.div_(scaler.loss_scale())

    optimizer._post_amp_backward = types.MethodType(divide, optimizer)
    for seed in range(2):
        backward(model, optimizer, seed)
    assert optimizer.calls == 2
    assert same(gradients(optimizer), by_apex_alone("O1"))


def test_a_prepare_that_does_nothing():
    """Trainers that accumulate scaled gradients by hand: the block's end unscales all of them."""
    model, optimizer = start("O1", loss_scale=128.0)
    optimizer._prepare_amp_backward = lambda: None
    with torch.no_grad():
        for param in model.parameters():
            param.grad = torch.full_like(param, 128.0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        assert all(bool((p.grad == 128.0).all()) for p in model.parameters())
        scaled.backward()
    found = gradients(optimizer)
    other, other_optimizer = start("O1", model=net(), loss_scale=128.0)
    backward(other, other_optimizer)
    for ours, theirs in zip(found, gradients(other_optimizer), strict=True):
        torch.testing.assert_close(ours, theirs + 1.0, rtol=1e-5, atol=1e-6)


def test_one_of_two_optimizers_has_its_own():
    models = [net(0), net(1)]
    makers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, (a, b) = amp.initialize(models, makers, opt_level="O2", loss_scale=128.0, verbosity=0)
    expected = []
    for method in (None, unscale_by_hand):
        if method is not None:
            b._post_amp_backward = types.MethodType(method, b)
        with amp.scale_loss(loss_of(models[0]) + loss_of(models[1]), [a, b]) as scaled:
            scaled.backward()
        expected.append([*gradients(a), *gradients(b)])
        for model in models:  # the same running statistics do not matter: training mode
            model.zero_grad()
    assert b.calls == 1
    assert same(*expected)


def unscale_as_apex_did(self, scaler):
    """Through ``LossScaler.unscale``, which leaves alone what comes after an overflow."""
    grads = [param.grad for group in self.param_groups for param in group["params"]]
    scaler.unscale(grads, grads, scaler.loss_scale(), models_are_masters=True)


def test_the_scripts_own_unscales_the_block_after_an_overflow():
    model, optimizer = start("O1")
    optimizer._post_amp_backward = types.MethodType(unscale_as_apex_did, optimizer)
    backward(model, optimizer, times=float("inf"))
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    model.zero_grad()
    backward(model, optimizer)
    found = gradients(optimizer)
    other, other_optimizer = start("O1", model=net())
    backward(other, other_optimizer)
    assert same(found, gradients(other_optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_what_two_optimizers_share_is_unscaled_once(level):
    model = net()
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    amp.initialize(model, pair, opt_level=level, loss_scale=128.0, verbosity=0)
    calls = []
    for optimizer in pair:
        told_of(optimizer, "_post_amp_backward", calls)
    for seed in range(2):
        backward(model, pair, seed)
    assert len(calls) == 4
    assert same(gradients(pair[1]), by_apex_alone(level))


def test_gradients_that_the_scripts_own_keeps_skip_the_step_after_an_overflow():
    """It accumulates by itself: what overflowed in an earlier block is added again."""
    model, optimizer = start("O1")
    kept = {}

    def prepare(self):
        for param in model.parameters():
            kept[param], param.grad = param.grad, None

    def post(self, scaler):
        scaler.unscale_grads([param.grad for param in model.parameters()])
        for param, old in kept.items():
            if old is not None:
                param.grad = param.grad + old

    optimizer._prepare_amp_backward = types.MethodType(prepare, optimizer)
    optimizer._post_amp_backward = types.MethodType(post, optimizer)
    backward(model, optimizer, times=float("inf"))
    backward(model, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_failing_one_is_told_of(capsys):
    model, optimizer = start("O2")

    def fail(scaler):
        raise ZeroDivisionError

    optimizer._post_amp_backward = fail
    scaled = amp.scale_loss(loss_of(model), optimizer)
    scaled.__enter__().backward()
    with pytest.raises(ZeroDivisionError):
        scaled.__exit__(None, None, None)
    assert "to be unscaled are cleared" in capsys.readouterr().out
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))
