"""``optimizer._prepare_amp_backward`` and ``_post_amp_backward``: scripts call them in a ``scale_loss`` of their own.

Blocks of amp call neither.
"""

import contextlib
import types

import pytest
from amp_training import INF, backward, loss_of, masters, net, same, sgd, start

from ampcompat import amp

NAMES = ["_prepare_amp_backward", "_post_amp_backward"]


@contextlib.contextmanager
def own_scale_loss(loss, optimizers, loss_id=0):
    """What a script's copy of apex's ``scale_loss`` does: it replaces ``step`` by a step that does nothing."""
    scaler = amp._amp_state.loss_scalers[loss_id]
    for optimizer in optimizers:
        if not optimizer._amp_stash.params_have_scaled_gradients:
            optimizer._prepare_amp_backward()
    yield loss.float() * scaler.loss_scale()
    scaler.clear_overflow_state()
    for optimizer in optimizers:
        optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
    if scaler.update_scale():
        for optimizer in optimizers:
            skip_next_step(optimizer)


def skip_next_step(optimizer):
    step = optimizer.step

    def skip(closure=None):
        optimizer.step = step
        for param in getattr(optimizer._amp_stash, "all_fp32_from_fp16_params", []):
            param.grad = None

    optimizer.step = skip


def own_backward(model, optimizer, seed=0, times=1.0):
    with own_scale_loss(loss_of(model, seed) * times, [optimizer]) as scaled:
        scaled.backward()


def moves_of(run, level, **options):
    """The masters and the scale after each of five steps of two passes; the second step overflows."""
    model, optimizer = start(level, lambda model: sgd(model, momentum=0.9), model=net(), **options)
    moves = []
    for step in range(5):
        run(model, optimizer, 2 * step)
        run(model, optimizer, 2 * step + 1, times=INF if step == 1 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
        moves.append((masters(optimizer), amp.state_dict()))
    return moves


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_scripts_own_scale_loss_trains_as_blocks_do(level):
    by_script = moves_of(own_backward, level, loss_scale="dynamic")
    by_blocks = moves_of(backward, level, loss_scale="dynamic")
    for (ours, our_state), (theirs, their_state) in zip(by_blocks, by_script, strict=True):
        assert same(ours, theirs)
        assert our_state == their_state
    (_, first_state), (second, _), *_ = by_blocks
    assert same(second, by_blocks[0][0])  # the overflow has skipped this step
    assert first_state["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 2}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_may_skip_by_what_update_scale_returns(level):
    model, optimizer = start(level)
    (scaler,) = amp._amp_state.loss_scalers
    skips = []
    for seed in range(3):
        optimizer._prepare_amp_backward()
        (loss_of(model, seed) * (INF if seed == 1 else 1.0) * scaler.loss_scale()).backward()
        optimizer._post_amp_backward(scaler)
        skips.append(scaler.update_scale())
        if not skips[-1]:
            optimizer.step()
            assert not amp.step_was_skipped(optimizer)
        optimizer.zero_grad()
    assert skips == [False, True, False]
    assert scaler.loss_scale() == 2.0**15
    assert all(param.isfinite().all() for param in masters(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_blocks_may_be_of_several_optimizers(level):
    gradients = []
    for scale_loss in (amp.scale_loss, own_scale_loss):
        models = [net(0), net(1)]
        optimizers = [sgd(model) for model in models]
        amp.initialize(models, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
        for seed in range(2):
            with scale_loss(loss_of(models[0], seed) + loss_of(models[1], seed), optimizers) as scaled:
                scaled.backward()
        gradients.append([param.grad for optimizer in optimizers for param in amp.master_params(optimizer)])
    assert same(*gradients)


def replace(optimizer, name, calls):
    """Replace a method by one that notes its arguments and goes on with the original."""
    original = getattr(optimizer, name)

    def method(self, *args):
        assert self is optimizer
        calls.append((name, *args))
        return original(*args)

    setattr(optimizer, name, types.MethodType(method, optimizer))


@pytest.mark.parametrize("replaced", [*([name] for name in NAMES), NAMES], ids=["prepare", "post", "both"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_script_has_put_in_their_place_is_called_by_the_script_alone(level, replaced):
    model, optimizer = start(level, loss_scale=128.0)
    calls = []
    for name in replaced:
        replace(optimizer, name, calls)
    with pytest.warns(UserWarning, match="was replaced"):
        backward(model, optimizer, 0)
    backward(model, optimizer, 1)
    assert calls == []
    gradients = [param.grad for param in amp.master_params(optimizer)]
    twin, twin_optimizer = start(level, model=net(), loss_scale=128.0)
    for seed in range(2):
        backward(twin, twin_optimizer, seed)
    assert same(gradients, [param.grad for param in amp.master_params(twin_optimizer)])
    twin_optimizer.zero_grad()
    for name in replaced:
        replace(twin_optimizer, name, calls)
    own_backward(twin, twin_optimizer)
    assert [name for name, *_ in calls] == replaced


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_script_has_set_aside_is_cleared_with_the_rest(level):
    """A pass raises between the two methods; the script catches that, and begins anew."""
    model, optimizer = start(level, loss_scale=128.0)
    own_backward(model, optimizer, 1)
    optimizer._prepare_amp_backward()
    optimizer.zero_grad()
    own_backward(model, optimizer, 2)
    got = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    own_backward(model, optimizer, 2)
    assert same(got, [p.grad for p in amp.master_params(optimizer)])
