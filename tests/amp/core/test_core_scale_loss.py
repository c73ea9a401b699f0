"""Blocks: several losses, models and optimizers, skips and what is said of them."""

import pytest
import torch
import torch.nn.functional as F
from amp_training import INF, backward, batch, loss_of, masters, net, same, sgd, start, train
from internals import scaler_of

from ampcompat import amp

pytestmark = pytest.mark.device

OVERFLOW = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


def scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_once_and_says_so_once(level, capsys):
    model, optimizer = start(level)
    for step in range(4):
        before = masters(optimizer)
        backward(model, optimizer, step, times=INF if step in (0, 2) else 1.0)
        assert optimizer.step() is None
        assert amp.step_was_skipped(optimizer) is (step in (0, 2))
        assert same(before, masters(optimizer)) is (step in (0, 2))
        optimizer.zero_grad()
    assert capsys.readouterr().out == OVERFLOW.format(0, 32768.0) + OVERFLOW.format(0, 16384.0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 1}}


def test_other_ranks_say_nothing(capsys, monkeypatch):
    model, optimizer = start("O2")
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        backward(model, optimizer, times=INF)
        optimizer.step()
    assert capsys.readouterr().out == ""
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize(("level", "scale"), [("O0", 1.0), ("O1", 128.0), ("O2", 128.0), ("O3", 1.0)])
def test_the_loss_comes_out_scaled_in_float32(level, scale):
    _, optimizer = start(level, loss_scale=None if scale == 1.0 else scale)
    for dtype in (torch.float16, torch.float32, torch.float64):
        with amp.scale_loss(torch.ones((), dtype=dtype), optimizer) as scaled:
            assert (scaled.dtype, scaled.item()) == (torch.float32, scale)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loss_that_is_no_scalar(level):
    # Partial-FC face recognition: the gradient of the logits is computed by hand.
    model, optimizer = start(level)
    plain = net()
    x, y = batch(1)
    logits = model(x).float()
    gradient = (torch.softmax(logits.detach(), 1) - F.one_hot(y, 3)) / len(y)
    with amp.scale_loss(logits, optimizer) as scaled:
        scaled.backward(gradient)
    F.cross_entropy(plain(x), y).backward()
    for got, want in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.float(), want.grad, rtol=2e-2, atol=2e-3)  # half arithmetic
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_empty_list_of_optimizers_unscales_nothing(level):
    model, optimizer = start(level, loss_scale=64.0)
    x, y = batch(1)
    x.requires_grad_()
    with amp.scale_loss(F.cross_entropy(model(x), y), []) as scaled:
        scaled.backward()
    plain = batch(1)[0].requires_grad_()
    F.cross_entropy(net()(plain), y).backward()
    torch.testing.assert_close(x.grad, plain.grad * 64, rtol=5e-2, atol=5e-2)  # half arithmetic
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 64.0, "unskipped": 1}
    model.zero_grad()
    train(model, optimizer, 1)


def test_initialized_without_an_optimizer():
    model = amp.initialize(net(), None, opt_level="O2", verbosity=0)
    with amp.scale_loss(loss_of(model), []) as scaled:
        scaled.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_two_scalers_overflow_before_one_step(capsys):
    model, optimizer = start("O2", num_losses=2)
    for loss_id in range(2):
        backward(model, optimizer, times=INF, loss_id=loss_id)
    optimizer.step()
    assert capsys.readouterr().out == OVERFLOW.format(0, 32768.0) + OVERFLOW.format(1, 32768.0)


def two_of_each(level, **kwargs):
    models = [net(0), net(1)]
    return amp.initialize(models, [sgd(m) for m in models], opt_level=level, verbosity=0, **kwargs)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_blocks_optimizers_only(level, capsys):
    models, optimizers = two_of_each(level, num_losses=2)
    amp._amp_state.verbosity = 1
    backward(models[0], optimizers[0], times=INF, loss_id=0)
    backward(models[1], optimizers[1], loss_id=1)
    before = [masters(o) for o in optimizers]
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(o) for o in optimizers] == [True, False]
    assert [same(masters(o), b) for o, b in zip(optimizers, before, strict=True)] == [True, False]
    for optimizer in optimizers:
        optimizer.zero_grad()
    with amp.scale_loss((loss_of(models[0]) + loss_of(models[1])) * INF, optimizers) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(o) for o in optimizers] == [True, True]
    assert scales() == [2.0**14, 2.0**16]
    out = capsys.readouterr().out
    # Each optimizer announces the step that it skips.
    assert out == OVERFLOW.format(0, 32768.0) + 2 * OVERFLOW.format(0, 16384.0)


def test_a_block_whose_loss_reaches_one_of_its_two_optimizers():
    models, optimizers = two_of_each("O2")
    before = [masters(optimizer) for optimizer in optimizers]
    backward(models[0], optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert [same(masters(o), b) for o, b in zip(optimizers, before, strict=True)] == [False, True]


def test_each_call_of_initialize_owns_its_scalers():
    first, first_optimizer = start("O2")
    second, second_optimizer = start("O1", model=net(1), loss_scale=4.0)
    backward(first, first_optimizer, times=INF)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0]
    assert scales() == [4.0, 2.0**15]
    assert scaler_of(first_optimizer).loss_scale() == 2.0**15
    with amp.scale_loss(loss_of(second), second_optimizer) as scaled:
        assert float(scaled.detach()) == 4.0 * float(loss_of(second).detach())
        scaled.backward()
    for optimizer in (first_optimizer, second_optimizer):
        optimizer.step()
    assert amp.step_was_skipped(first_optimizer)
    assert not amp.step_was_skipped(second_optimizer)


@pytest.mark.parametrize("optimizers", [None, "an engine", 3, [object()]])
def test_disabled_everything_passes(optimizers):
    model, optimizer = net(), None
    optimizer = sgd(model)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    with amp.scale_loss(loss := loss_of(model), optimizers) as scaled:
        assert scaled is loss
    with amp.scale_loss("no tensor", optimizer) as scaled:
        assert scaled == "no tensor"
    assert amp.state_dict() == {}
    assert not amp.step_was_skipped(optimizer)
    assert same(list(amp.master_params(optimizer)), list(model.parameters()))


def test_disabled_objects_stay_plain_beside_enabled_ones():
    plain, plain_optimizer = net(), None
    plain_optimizer = sgd(plain)
    amp.initialize(plain, plain_optimizer, enabled=False)
    start("O2", model=net(1))
    with amp.scale_loss(loss := loss_of(plain), plain_optimizer) as scaled:
        assert scaled is loss


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "made", [lambda d: d.values(), lambda d: iter(d.values()), lambda d: (o for o in d.values()), set]
)
def test_optimizers_come_in_any_collection(level, made):
    models, optimizers = two_of_each(level)
    given = {"a": optimizers[0], "b": optimizers[1]}
    given = set(optimizers) if made is set else made(given)
    with amp.scale_loss(loss_of(models[0], 1) + loss_of(models[1], 2), given) as scaled:
        scaled.backward()
    got = [[p.grad for p in amp.master_params(o)] for o in optimizers]
    for index, model in enumerate([net(0), net(1)]):
        model, optimizer = start(level, model=model)
        backward(model, optimizer, index + 1)
        assert same(got[index], [p.grad for p in amp.master_params(optimizer)])


@pytest.mark.parametrize("twice", ["optimizer", "model", "both"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_same_object_given_twice_counts_once(level, twice):
    model = net()
    optimizer = sgd(model)
    models = [model] * (1 if twice == "optimizer" else 2)
    optimizers = [optimizer] * (1 if twice == "model" else 2)
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    once, once_optimizer = start(level)
    for seed in range(2):
        backward(model, optimizers, seed)
        optimizer.step()
        optimizer.zero_grad()
    train(once, once_optimizer, 2)
    assert same(masters(optimizer), masters(once_optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_of_other_params_does_nothing(level):
    """Its parameters are in no model of the call: they stay float32, and get no gradient."""
    model, other = net(0), net(1)
    optimizer = sgd(other)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    before = masters(optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert same(before, masters(optimizer))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_initialize_between_blocks_and_their_step(level):
    """Gradients and an overflow are still known after a second ``initialize``."""
    model, optimizer = start(level)
    backward(model, optimizer, 1, delay_unscale=True)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(model, optimizer, 2)
    got = [p.grad.clone() for p in amp.master_params(optimizer)]
    twin, twin_optimizer = start(level)
    backward(twin, twin_optimizer, 1)
    backward(twin, twin_optimizer, 2)
    for a, b in zip(got, amp.master_params(twin_optimizer), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=2e-3, atol=1e-5)  # the half sum rounds once more
    backward(model, optimizer, 3, times=INF)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = masters(optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(before, masters(optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_block_used_twice_says_so(level):
    model, optimizer = start(level)
    block = amp.scale_loss(loss_of(model), optimizer)
    with block as scaled:
        scaled.backward()
    before = [p.grad.clone() for p in amp.master_params(optimizer)]
    with pytest.raises(RuntimeError, match=r"scale_loss block .* entered twice - .* - call amp.scale_loss"), block:
        pass
    assert same(before, [p.grad for p in amp.master_params(optimizer)])
    optimizer.step()
    train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_block_that_raised_is_used_up_too(level):
    model, optimizer = start(level)
    block = amp.scale_loss(loss_of(model), optimizer)
    with pytest.raises(KeyError), block:
        raise KeyError
    with pytest.raises(RuntimeError, match="entered twice"):
        block.__enter__()
    train(model, optimizer, 1)


@pytest.mark.parametrize(("first", "second"), [("O0", "O2"), ("O2", "O0"), ("O3", "O1")])
def test_optimizers_with_unlike_loss_scales_have_no_block_in_common(first, second):
    models = [net(0), net(1)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer, level in zip(models, optimizers, (first, second), strict=True):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss = loss_of(models[0]) + loss_of(models[1])
    with pytest.raises(RuntimeError, match="a block has one loss scale"), amp.scale_loss(loss, optimizers):
        pass
    assert all(param.grad is None for model in models for param in model.parameters())


def test_optimizers_of_two_calls_with_one_kind_of_loss_scale_share_a_block():
    """A GAN whose halves come by a call each."""
    models = [net(0), net(1)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(loss_of(models[0]) + loss_of(models[1]), optimizers) as scaled:
        scaled.backward()
    assert all(param.grad is not None for optimizer in optimizers for param in amp.master_params(optimizer))
