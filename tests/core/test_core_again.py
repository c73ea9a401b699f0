"""``amp.initialize`` again, at another level, with a model alone: its optimizer is under amp from the call before."""

import pytest
import torch
from core_kit import assert_tied, backward, loss_of, same, start, train

from ampcompat import amp

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


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


@pytest.mark.parametrize("before", ["O0", "O1", "O3"])
def test_an_optimizer_without_masters_of_a_model_that_is_to_have_them_is_warned_of(before):
    model, optimizer = start(before)
    with pytest.warns(UserWarning, match="SGD of an earlier amp.initialize .* pass the optimizer too"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, 1)
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
