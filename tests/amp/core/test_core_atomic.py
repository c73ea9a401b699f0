"""An ``initialize`` that fails half way puts everything back."""

import pytest
import torch
from core_kit import backward, net, same
from internals import master_of, masters_by_name, sizes_of_state, view

from ampcompat import amp
from ampcompat.amp import frontend
from ampcompat.amp.scaling import optimizer
from ampcompat.amp.scaling.session import Session

PLACES = {
    "attaching the model": (frontend, "set_policy", False),
    "attaching the optimizer": (optimizer, "match_state", False),
    "beginning the casts": (Session, "begin_casts", False),
    "after the casts have begun": (Session, "begin_casts", True),
}


class Broken(Exception):
    pass


def breaks(patch, owner, name, after):
    """Have a call of ``owner.name`` raise, at once or ``after`` it has done its work."""
    original = getattr(owner, name)

    def fail(*args, **kwargs):
        if after:
            original(*args, **kwargs)
        raise Broken

    patch.setattr(owner, name, fail)


def everything(model, optimizer, torch_state):
    return {
        "torch": torch_state(),
        "class": type(model),
        "modules": [sorted(m.__dict__) for m in model.modules()],
        "tensors": [(id(t), t.dtype, t.tolist()) for t in (*model.parameters(), *model.buffers())],
        "gradients": [p.grad.tolist() for p in model.parameters()],
        "groups": [(id(g["params"]), [id(p) for p in g["params"]]) for g in optimizer.param_groups],
        "methods": sorted(optimizer.__dict__),
        "state": {id(p): sorted(s) for p, s in optimizer.state.items()},
        "amp": {k: v for k, v in view().items() if k != "verbosity"},
        "scalers": amp.state_dict(),
        "optimizers": {name: size for name, size in sizes_of_state().items() if name.startswith("optimizers")},
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_a_failure_half_way_leaves_no_trace(level, place, monkeypatch, torch_state):
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 6)).sum().backward()
    sgd.step()
    before = everything(model, sgd, torch_state)
    with monkeypatch.context() as patch:
        breaks(patch, *PLACES[place])
        with pytest.raises(Broken):
            amp.initialize(model, sgd, opt_level=level, verbosity=0)
    assert everything(model, sgd, torch_state) == before
    twin = net()
    twin_sgd = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    twin(torch.ones(3, 6)).sum().backward()
    twin_sgd.step()
    for one, its in ((model, sgd), (twin, twin_sgd)):
        its.zero_grad()
        amp.initialize(one, its, opt_level=level, verbosity=0)
        backward(one, its)
        its.step()
    assert same(list(amp.master_params(sgd)), list(amp.master_params(twin_sgd)))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_a_failure_at_another_level_leaves_the_masters(level, monkeypatch):
    def stepped(model):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        amp.initialize(model, sgd, opt_level="O2", verbosity=0)
        for _ in range(2):
            backward(model, sgd)
            sgd.step()
        return sgd

    def masters(model):
        held = [masters_by_name(module) for module in model.modules()]
        found = [master for its in held for master in its.values()]
        sides = [(id(m), m.dtype, m.written_copy()) for m in found]
        return sides, [master_of(m.half) is m is master_of(m.value) for m in found]

    model, twin = net(), net()
    sgd, twin_sgd = stepped(model), stepped(twin)
    before = masters(model)
    with monkeypatch.context() as patch:
        breaks(patch, *PLACES["attaching the optimizer"])
        with pytest.raises(Broken):
            amp.initialize(model, sgd, opt_level=level, verbosity=0)
    assert masters(model) == before
    assert before[1]
    assert all(before[1])
    for one, its in ((model, sgd), (twin, twin_sgd)):
        backward(one, its)
        its.step()
    assert same(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("first", ["O1", "O2", "O4"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4"])
def test_a_failure_beside_a_running_model_leaves_its_casts(level, first, monkeypatch, torch_state):
    running, running_sgd = net(), None
    running_sgd = torch.optim.SGD(running.parameters(), lr=0.1)
    amp.initialize(running, running_sgd, opt_level=first, verbosity=0)

    def seen():
        product = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype, torch.ones(2).half().exp().dtype
        return product, running(torch.ones(3, 6)).dtype, torch_state()

    before = seen()
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patch:
        breaks(patch, *PLACES["after the casts have begun"])
        with pytest.raises(Broken):
            amp.initialize(model, sgd, opt_level=level, verbosity=0)
    assert seen() == before
    backward(running, running_sgd)
    running_sgd.step()


@pytest.mark.parametrize("first", ["O1", "O2", "disabled"])
def test_a_failed_call_does_not_take_the_optimizer(first, monkeypatch):
    """After ``initialize`` raised, the optimizer still belongs to the call before."""
    other, model = net(1), net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, sgd, enabled=first != "disabled", opt_level="O1" if first == "disabled" else first)
    amp.initialize(other, opt_level="O2", verbosity=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with monkeypatch.context() as patch:
        breaks(patch, *PLACES["after the casts have begun"])
        with pytest.raises(Broken):
            amp.initialize(model, sgd, opt_level="O3", verbosity=0)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    loss = model(torch.ones(3, 6)).sum()
    with amp.scale_loss(loss, sgd) as scaled:
        assert (scaled is loss) is (first == "disabled")
    if first != "disabled":
        with pytest.raises(RuntimeError, match=f"at {first}, not O3"):
            amp.initialize(model, opt_level="O3", verbosity=0)
