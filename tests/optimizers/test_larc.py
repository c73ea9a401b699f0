"""LARC as an object: what it shares with the optimizer inside, copies, schedulers, and how amp handles it."""

import copy
import inspect
import pickle

import pytest
import torch

from ampcompat import _torch
from ampcompat.optimizers import FusedSGD
from ampcompat.parallel.LARC import LARC


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return model, inner, LARC(optimizer=inner, **options)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()


def test_signature_is_apexs():
    defaults = [(p.name, p.default) for p in inspect.signature(LARC).parameters.values()][1:]
    assert defaults == [("trust_coefficient", 0.02), ("clip", True), ("eps", 1e-8)]


def test_only_an_optimizer_can_be_wrapped():
    with pytest.raises(TypeError, match="LARC wraps an optimizer, not list"):
        LARC([torch.zeros(1)])


def test_everything_is_shared_with_the_optimizer_inside():
    model, inner, larc = make(trust_coefficient=0.001, clip=False)
    assert isinstance(larc, torch.optim.Optimizer)
    assert larc.optim is inner
    assert larc.param_groups is inner.param_groups
    assert larc.state is inner.state
    assert larc.defaults is inner.defaults
    train(model, larc, range(2))
    assert len(larc.state) == 2
    larc.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1.0})
    assert len(inner.param_groups) == 2
    assert repr(inner) in repr(larc)
    larc.param_groups, larc.state = inner.param_groups[:1], inner.state
    assert len(inner.param_groups) == 1


def test_float16_norms_do_not_overflow():
    p = torch.nn.Parameter(torch.full((70000,), 300.0, dtype=torch.float16))
    p.grad = torch.full_like(p, 300.0)
    LARC(torch.optim.SGD([p], lr=1.0), trust_coefficient=0.1, clip=False).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 270.0))


def test_lr_of_zero_and_groups_without_weight_decay():
    p = torch.nn.Parameter(torch.ones(2))
    larc = LARC(torch.optim.Rprop([p], lr=0.0))
    p.grad = torch.ones(2)
    larc.step()
    assert p.isfinite().all()
    assert "weight_decay" not in larc.param_groups[0]


def test_weight_decay_comes_back_when_the_step_fails():
    model, inner, larc = make()
    inner.step = None
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(TypeError):
        larc.step()
    assert inner.param_groups[0]["weight_decay"] == 0.01


def test_sparse_gradients_are_refused_before_anything_changes():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    dense = torch.nn.Parameter(torch.ones(2))
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    larc = LARC(torch.optim.SGD([dense, embedding.weight], lr=1.0))
    with pytest.raises(RuntimeError, match="LARC does not support sparse gradients"):
        larc.step()
    assert torch.equal(dense.grad, torch.ones(2))


def test_closure():
    model, _, larc = make()
    calls = []

    def closure():
        larc.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert larc.step(closure) is calls[0]
    assert len(calls) == 1


def test_zero_grad_passes_the_choice_on():
    p = torch.nn.Parameter(torch.ones(2))
    larc = LARC(FusedSGD([p], lr=0.1))
    for arguments, is_none in (({}, False), ({"set_to_none": True}, True), ({"set_to_none": False}, False)):
        p.grad = torch.ones(2)
        larc.zero_grad(**arguments)
        assert (p.grad is None) == is_none


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_alike(through):
    model, _, larc = make(trust_coefficient=0.5, clip=False, eps=1e-6)
    train(model, larc, range(2))
    twin_model, twin = through((model, larc))
    assert (twin.trust_coefficient, twin.clip, twin.eps) == (0.5, False, 1e-6)
    train(model, larc, range(2, 4))
    train(twin_model, twin, range(2, 4))
    assert torch.equal(model.weight, twin_model.weight)
    assert twin.optim is not larc.optim


def test_state_dict_is_that_of_the_optimizer_inside():
    model, inner, larc = make()
    train(model, larc, range(2))
    other_model, _, other = make()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(inner.state_dict()))  # torch.optim keeps the tensors it is given
    train(model, larc, range(2, 4))
    train(other_model, other, range(2, 4))
    assert torch.equal(model.weight, other_model.weight)


@pytest.mark.parametrize("on", ["wrapper", "inside"])
def test_schedulers_work_on_either_without_a_warning(on):
    model, inner, larc = make()
    scheduler = torch.optim.lr_scheduler.StepLR(larc if on == "wrapper" else inner, 1, gamma=0.5)
    train(model, larc, range(1))
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05


def test_grad_scaler_checks_larc_itself():
    """The optimizer inside takes ``found_inf``, but LARC does not: a GradScaler skips its step by itself."""
    p = torch.nn.Parameter(torch.ones(2))
    larc = LARC(FusedSGD([p], lr=0.1))
    assert larc.optim._step_supports_amp_scaling
    assert not larc._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    p.grad = torch.tensor([float("inf"), 1.0])
    scaler.step(larc)
    assert torch.equal(p.detach(), torch.ones(2))


def test_marks_of_amp_are_not_read_from_the_optimizer_inside():
    _, inner, larc = make()
    inner._amp_stash = object()
    assert not hasattr(larc, "_amp_stash")
    with pytest.raises(AttributeError, match="no_such"):
        larc.no_such


def test_complex_params_are_refused_before_anything_changes():
    real, imaginary = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    real.grad, imaginary.grad = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    larc = LARC(torch.optim.SGD([real, imaginary], lr=1.0))
    with pytest.raises(RuntimeError, match="LARC only supports floating-point params"):
        larc.step()
    assert torch.equal(real.grad, torch.ones(2))


def test_sharded_params_are_refused(monkeypatch):
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    monkeypatch.setattr(_torch, "is_sharded", lambda param: True)
    with pytest.raises(RuntimeError, match="LARC got a param of shape .* that fully_shard has sharded"):
        LARC(torch.optim.SGD([p], lr=1.0)).step()


def test_zero_weights_and_zero_gradients_have_no_rate():
    weights = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.zeros(2)),
    ]
    for p, grad in zip(weights, (torch.ones(2), torch.zeros(2), torch.zeros(2)), strict=True):
        p.grad = grad
    LARC(torch.optim.SGD(weights, lr=1.0, weight_decay=0.5)).step()
    assert [p.tolist() for p in weights] == [[-1, -1], [1, 1], [0, 0]]


def test_gradients_in_other_strides_and_half_are_scaled_in_place():
    wide, half = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    grads = torch.ones(3, 2).t(), torch.ones(4, dtype=torch.float16)
    wide.grad, half.grad = grads
    LARC(torch.optim.SGD([wide, half], lr=1.0), trust_coefficient=0.5, clip=False, eps=0.0).step()
    assert wide.grad is grads[0]
    assert half.grad is grads[1]
    torch.testing.assert_close(wide.detach(), torch.full((2, 3), 0.5))
    torch.testing.assert_close(half.detach(), torch.full((4,), 0.5, dtype=torch.float16))
