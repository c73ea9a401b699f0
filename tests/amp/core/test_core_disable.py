"""``amp.initialize(enabled=False)``: nothing under amp, whatever an earlier call had done to these objects."""

import sys

import pytest
import torch
import torch.nn.functional as F
from amp_training import Net, backward, batch, loss_of, net, same, sgd, start, train
from internals import is_under_amp, scaler_of

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def momentum(model):
    return sgd(model, momentum=0.9)


def plain_step(model, optimizer, seed):
    F.cross_entropy(model(batch(seed)[0]), batch(seed)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_the_later_call_wins_and_gives_plain_pytorch_back(level):
    model, optimizer = start(level, momentum)
    params = list(model.parameters())
    train(model, optimizer, 3)
    exact = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [optimizer.state[p]["momentum_buffer"].float() for p in amp.master_params(optimizer)]
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    # Plain: class, dtypes, the same parameters with the masters' values, the optimizer on them, no casts anywhere.
    assert type(model) is Net
    assert not is_under_amp(optimizer)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert {t.dtype for t in (*model.parameters(), *model.bn.buffers())} <= {torch.float32, torch.int64}
    assert all(torch.equal(v, exact[k]) for k, v in model.state_dict().items())
    assert model.state_dict()["a.weight"].data_ptr() == model.a.weight.data_ptr()
    assert same([optimizer.state[p]["momentum_buffer"] for p in params], moments)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    # It goes on as plain PyTorch does from these weights and moments, to the bit.
    twin = Net()
    twin.load_state_dict(exact)
    other = momentum(twin)
    for mine, param in zip(params, twin.parameters(), strict=True):
        other.state[param]["momentum_buffer"] = optimizer.state[mine]["momentum_buffer"].clone()
    for seed in range(3):
        with amp.scale_loss(loss := loss_of(model, seed), optimizer) as scaled:
            assert scaled is loss
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_step(twin, other, seed)
    assert same(list(model.parameters()), list(twin.parameters()))
    assert amp.state_dict() == {}


@pytest.mark.parametrize("level", LEVELS)
def test_and_a_call_after_that_enables_again(level):
    model, optimizer = start(level, momentum)
    train(model, optimizer, 2)
    for _ in range(2):
        amp.initialize(model, optimizer, enabled=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, 2)
    depth, wrapped = 0, optimizer.step
    while hasattr(wrapped, "__wrapped__"):
        wrapped, depth = wrapped.__wrapped__, depth + 1
    assert depth <= 3
    again, again_optimizer = start(level, momentum)
    train(again, again_optimizer, 2)
    again, again_optimizer = amp.initialize(again, again_optimizer, opt_level=level, verbosity=0)
    train(again, again_optimizer, 2)
    assert same(list(amp.master_params(optimizer)), list(amp.master_params(again_optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_disabling_others_leaves_running_ones_alone(level):
    """``enabled=False`` for another model changes nothing for those that are initialized."""
    model, optimizer = start(level)
    casts = torch.is_autocast_enabled("cpu")
    other = net(1)
    amp.initialize(other, sgd(other), enabled=False)
    assert torch.is_autocast_enabled("cpu") is casts
    backward(model, optimizer, 1)
    optimizer.step()
    twin, twin_optimizer = start(level)
    backward(twin, twin_optimizer, 1)
    twin_optimizer.step()
    assert same(list(amp.master_params(optimizer)), list(amp.master_params(twin_optimizer)))


def test_other_models_go_on_when_one_is_disabled():
    first, first_optimizer = start("O1")
    second, second_optimizer = start("O1", model=net(1))
    amp.initialize(second, second_optimizer, enabled=False)
    # Code outside of the first model's forward is cast for as long as that trains: its losses need it.
    assert second(torch.ones(4, 6)).dtype == torch.float16
    with amp.disable_casts():
        assert second(torch.ones(4, 6)).dtype == torch.float32
    assert first(torch.ones(4, 6)).dtype == torch.float16
    train(first, first_optimizer, 1)
    assert scaler_of(first_optimizer)._unskipped == 1
    amp.initialize(first, first_optimizer, enabled=False)
    assert second(torch.ones(4, 6)).dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_built_under_amp_go_on_without_a_warning(level):
    model, optimizer = start(level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, enabled=False)
    for seed in range(2):
        plain_step(model, optimizer, seed)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_an_optimizer_alone_and_a_model_alone():
    model, optimizer = start("O2")
    amp.initialize([], optimizer, enabled=False)
    amp.initialize(model, enabled=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters()]
    plain_step(model, optimizer, 1)
    assert not same(before, [p.detach() for p in model.parameters()])


def test_things_that_are_no_models_pass_a_disabled_call():
    model, optimizer = start("O1")
    assert amp.initialize([model, None, "engine"], optimizer, enabled=False) == ([model, None, "engine"], optimizer)
    assert type(model) is Net


@pytest.mark.parametrize(
    ("place", "calls"),
    [("half.casting._cast", 2), ("scaling.optimizer.match_state", 0), ("session_objects.set_policy", 0)],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failure_half_way_is_repaired_by_the_same_call(level, place, calls, monkeypatch):
    def trained():
        model, optimizer = start(level, momentum)
        train(model, optimizer, 2)
        return model, optimizer

    model, optimizer = trained()
    twin, twin_optimizer = trained()
    left = [None] * calls
    with monkeypatch.context() as patch:
        module, _, name = f"ampcompat.amp.{place}".rpartition(".")
        original = getattr(sys.modules[module], name)

        def fail(*args):
            if not left:
                raise MemoryError
            left.pop()
            return original(*args)

        patch.setattr(sys.modules[module], name, fail)
        if level == "O2" or name != "_cast":  # O1 casts no weights
            with pytest.raises(MemoryError):
                amp.initialize(model, optimizer, enabled=False)
    for one, its in ((model, optimizer), (twin, twin_optimizer)):
        amp.initialize(one, its, enabled=False)
        assert type(one) is Net
    for one, its in ((model, optimizer), (twin, twin_optimizer)):
        plain_step(one, its, 1)
    assert same(list(model.parameters()), list(twin.parameters()))


def test_casts_end_when_a_call_that_failed_is_made_again(monkeypatch):
    model, optimizer = start("O1", momentum)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ampcompat.amp.scaling.optimizer.match_state", fail)
        with pytest.raises(MemoryError):
            amp.initialize(model, optimizer, enabled=False)
    amp.initialize(model, optimizer, enabled=False)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert torch.ones(2).half().exp().dtype == torch.float16


def test_leaving_amp_includes_inner_models():
    """``enabled=False`` also restores a module of ``keep_fp32`` and a model that lies in the model."""
    model = net()
    optimizer = sgd(model)
    amp.initialize([model, model.b], optimizer, opt_level="O2", keep_fp32=["a"], verbosity=0)
    amp.initialize(model, optimizer, enabled=False)
    assert [type(m) for m in model.modules()] == [type(m) for m in net().modules()]
    assert not [name for m in model.modules() for name in vars(m) if name.startswith("_amp")]
    assert not any(m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())
    plain_step(model, optimizer, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_is_not_taken_out_without_its_optimizer(level):
    model, optimizer = start(level, momentum)
    train(model, optimizer, 2)
    with pytest.raises(RuntimeError, match=f"under amp at {level}, and would take the model out of amp - "):
        amp.initialize(model, enabled=False)
    train(model, optimizer, 1)
    twin, twin_optimizer = start(level, momentum)
    train(twin, twin_optimizer, 2)
    train(twin, twin_optimizer, 1)
    assert same(list(amp.master_params(optimizer)), list(amp.master_params(twin_optimizer)))


@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_disabling_others_leaves_casts_of_init_alone():
    handle = amp.init()
    other = net(1)
    amp.initialize(other, sgd(other), enabled=False)
    assert handle.is_active()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    handle._deactivate()


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_gradients_of_a_delayed_block_stay(level):
    """They are unscaled."""
    model, optimizer = start(level, loss_scale=128.0)
    backward(model, optimizer, 1)
    backward(model, optimizer, 2, delay_unscale=True)
    before = [param.grad.clone() for param in model.parameters()]
    amp.initialize(model, optimizer, enabled=False)
    assert same([param.grad for param in model.parameters()], before)
