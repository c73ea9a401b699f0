"""A later ``initialize`` of the model alone: its optimizer goes where the model goes."""

import pytest
import torch
from core_kit import assert_tied, backward, batch, loss_of, net, same, sgd, start, train

from ampcompat import amp

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CHANGES = [(before, after) for before in LEVELS for after in [*LEVELS, None] if before != after]  # None: enabled=False


def momentum(model):
    return sgd(model, momentum=0.9)


def again(models, optimizers, level, **kwargs):
    how = {"enabled": False} if level is None else {"opt_level": level}
    return amp.initialize(models, optimizers, verbosity=0, **how, **kwargs)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_as_if_the_optimizer_had_been_given_again(before, after):
    trained = []
    for together in (True, False):
        model = net()
        optimizer = momentum(model)
        again(model, optimizer, before)
        train(model, optimizer, 3)
        again(model, optimizer if together else None, after)
        losses = train(model, optimizer, 3)
        trained.append([*losses, *amp.master_params(optimizer), *model.parameters()])
    assert [t.dtype for t in trained[0]] == [t.dtype for t in trained[1]]
    assert same(*trained)


@pytest.mark.parametrize("after", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("before", ["O2", "O5"])
def test_an_optimizer_with_masters_follows_its_model(before, after):
    model, optimizer = start(before)
    train(model, optimizer, 2)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    amp.initialize(model, opt_level=after, verbosity=0)
    assert after == "O3" or all(torch.equal(value, exact[name]) for name, value in model.state_dict().items())
    losses = [backward(model, optimizer, 0)]
    first = loss_of(model, 0).item()
    for _ in range(8):  # past the rounds in which masters are compared by value
        optimizer.step()
        optimizer.zero_grad()
        losses.append(backward(model, optimizer, 0))
        assert {p.dtype for p in model.a.parameters()} == {HALF.get(after, torch.float32)}
    assert losses[0].item() == pytest.approx(first, rel=1e-2)
    assert losses[-1] < losses[0] - 0.1
    if after not in HALF:
        assert all(a is b for a, b in zip(amp.master_params(optimizer), model.parameters(), strict=True))
    elif after != "O3":
        assert_tied(model)


def test_a_failure_half_way_leaves_the_optimizer_with_its_masters(monkeypatch):
    model, optimizer = start("O2")
    before = list(amp.master_params(optimizer))

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ampcompat.amp.checkpoint.apply_pending", fail)
        with pytest.raises(MemoryError):
            amp.initialize(model, opt_level="O0", verbosity=0)
    assert all(a is b for a, b in zip(before, amp.master_params(optimizer), strict=True))
    train(model, optimizer, 2)
    twin, twin_optimizer = start("O2")
    train(twin, twin_optimizer, 2)
    assert same(list(amp.master_params(optimizer)), list(amp.master_params(twin_optimizer)))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_at_the_same_level_it_keeps_its_scale(level):
    model, optimizer = start(level, momentum)
    scaler = optimizer._amp_stash.session.scalers[0]
    train(model, optimizer, 2)
    assert amp.initialize(model, opt_level=level, verbosity=0) is model  # as before every evaluation
    assert optimizer._amp_stash.session.scalers[0] is scaler
    train(model, optimizer, 1)
    assert scaler._unskipped == (0 if level in ("O0", "O3") else 3)


def joint(level):
    models = [net(0), net(1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    return amp.initialize(models, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("after", ["O0", "O1", "O3", None])
def test_masters_of_another_models_half_weights_cannot_be_left(after):
    models, optimizer = joint("O2")
    backward(models[0], optimizer)
    before = [id(p) for p in amp.master_params(optimizer)]
    with pytest.raises(RuntimeError, match="pass them together, with the optimizer"):
        again(models[0], None, after)
    assert [id(p) for p in amp.master_params(optimizer)] == before
    assert {p.dtype for p in models[0].parameters()} == {torch.float16, torch.float32}
    optimizer.step()
    train(models[1], optimizer, 1)
    again(models, optimizer, after)


@pytest.mark.parametrize("after", ["O0", None])
def test_an_optimizer_that_another_model_needs_stays_where_weights_stay_float32(after):
    models, optimizer = joint("O1")
    session = optimizer._amp_stash.session
    again(models[0], None, after)
    assert optimizer._amp_stash.session is session
    for model in models:  # small gradients of the second would be lost without the scale
        with amp.scale_loss(model(batch(1)[0]).float().sum() * 1e-9, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert all(p.grad.count_nonzero() for name, p in model.named_parameters() if name.startswith("b."))
        optimizer.zero_grad()


def test_other_optimizers_stay():
    first, first_optimizer = start("O1")
    second, second_optimizer = start("O1", model=net(1))
    session = second_optimizer._amp_stash.session
    again(first, None, "O2")
    assert second_optimizer._amp_stash.session is session
    assert first_optimizer._amp_stash.session is not session


def test_not_inside_a_block():
    model, optimizer = start("O1")
    with (
        pytest.raises(RuntimeError, match="inside a scale_loss block"),
        amp.scale_loss(model(torch.ones(4, 6)).sum(), optimizer),
    ):
        again(model, None, "O2")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    train(model, optimizer, 1)
