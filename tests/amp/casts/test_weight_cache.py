"""Autocast's cache of cast weights: an entry that outlives its use would be silent, and fatal."""

import pytest
import torch
from torch import nn

from ampcompat import _torch
from ampcompat.amp import initialize, scale_loss

pytestmark = [pytest.mark.device, pytest.mark.torch]


def trained(steps=3, seed=0, **kw):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return initialize(model, optimizer, opt_level="O1", verbosity=0, **kw)


def one_step(model, optimizer, x):
    loss = model(x).float().pow(2).mean()
    with scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_weights_used_in_ambient_code_are_seen_to_move():
    model, optimizer = trained()
    x = torch.randn(8, 4)
    losses = []
    for _ in range(4):
        loss = nn.functional.linear(nn.functional.linear(x, model[0].weight), model[1].weight).float().pow(2).mean()
        with scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) == 4


def test_step_and_load_are_seen_by_the_next_forward():
    model, optimizer = trained()
    x = torch.randn(8, 4)
    first = {k: v.clone() for k, v in model.state_dict().items()}
    start = one_step(model, optimizer, x)
    assert one_step(model, optimizer, x) != start
    model.load_state_dict(first)
    assert one_step(model, optimizer, x) == start


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_does_not_spoil_later_training(mode):
    """A cast of a weight that was cached without gradients must not be used in a forward that needs them."""
    model, optimizer = trained()
    x = torch.randn(8, 4)
    model.eval()
    with mode():
        model(x)
    model.train()
    assert model(x).requires_grad
    one_step(model, optimizer, x)
    assert all(p.grad is None for p in model.parameters())


def test_a_no_grad_use_inside_the_forward_does_not_poison_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                target = self.fc(x)
            return (self.fc(x) - target.detach() + 1).float()

    model = Twice()
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with scale_loss(1e-3 * model(torch.randn(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    assert model.fc.weight.grad.abs().sum() > 0


def test_another_dtype_inside_the_forward():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            first = self.fc(x)
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                second = self.fc(x)
            return first, second, self.fc(x)

    model = initialize(Mixed(), opt_level="O1", verbosity=0)
    dtypes = [y.dtype for y in model(torch.randn(2, 4))]
    assert dtypes == [torch.float16, torch.bfloat16, torch.float16]


def test_the_cache_is_used_inside_a_forward_and_empty_after_it():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            self.cache = torch.is_autocast_cache_enabled()
            return self.fc(self.fc(x))

    model = initialize(Unrolled(), opt_level="O1", verbosity=0)
    model(torch.randn(2, 4))
    weights_survive_no_grad = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 7)
    assert model.cache == weights_survive_no_grad
    assert not torch.is_autocast_cache_enabled()


def test_a_write_between_two_forwards_is_seen():
    """Of one iteration, too, and through ``.data``, which no counter tells of: clipping, an average put in place."""
    model = initialize(nn.Linear(4, 4, bias=False), opt_level="O1", verbosity=0)
    x = torch.randn(2, 4)
    first = model(x)
    model.weight.data.mul_(2)
    assert torch.equal(model(x), 2 * first)


@pytest.mark.parametrize("inner", ["amp", "plain"])
def test_a_forward_that_trains_sees_its_weights_move(inner):
    """A trainer that is a module, or a meta-learner: loss, backward and step all lie inside one forward."""

    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            self.losses = []

        def forward(self, x):
            for _ in range(3):
                loss = self.net(x).float().pow(2).mean()
                if inner == "amp":
                    with scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                    self.net(x)  # what it casts must not outlive the step
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    grads = torch.autograd.grad(loss, list(self.net.parameters()))
                    with torch.no_grad():
                        for param, grad in zip(self.net.parameters(), grads, strict=True):
                            param.sub_(grad, alpha=0.5)
                self.losses.append(loss.item())
            return loss

    torch.manual_seed(0)
    trainer = Trainer()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    trainer, optimizer = initialize(trainer, optimizer, opt_level="O1", verbosity=0)
    x = torch.randn(8, 4)
    Trainer.forward(trainer, x)
    expected, trainer.losses = trainer.losses, []
    torch.manual_seed(0)
    trainer.load_state_dict(Trainer().state_dict())
    trainer(x)
    assert trainer.losses == expected
    assert len(set(expected)) == 3


def casts_in_graph(output, param):
    """How many casts of ``param`` the graph of ``output`` has."""
    casts, pending = set(), [output.grad_fn]
    for node in pending:
        for inner, _ in node.next_functions:
            if getattr(inner, "variable", None) is param:
                casts.add(node)
            elif inner is not None and inner not in pending:
                pending.append(inner)
    return len(casts)


def test_a_kept_module_leaves_the_casts_of_the_forward_around_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.kept = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.kept(self.fc(x)))

    model = initialize(Tied(), opt_level="O1", verbosity=0, keep_fp32="kept")
    uses_of_the_weight = 2
    casts = uses_of_the_weight if _torch.CACHES_WEIGHTS_ACROSS_GRAD_MODES else 1
    assert casts_in_graph(model(torch.randn(2, 4)), model.fc.weight) == casts
    assert casts_in_graph(model(torch.randn(2, 4)), model.kept.weight) == 1
