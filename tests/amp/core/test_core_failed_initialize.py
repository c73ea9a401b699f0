"""``initialize`` changes nothing until all checks have passed; one that fails later is repaired by the same call."""

import pytest
import torch
from amp_training import net, same, train
from internals import sizes_of_state, view

from ampcompat import amp
from ampcompat.amp import session_objects
from ampcompat.amp.adapters import ddp
from ampcompat.amp.half import casting
from ampcompat.amp.lists import torch_overrides
from ampcompat.amp.scaling import groups

LEVELS = ["O0", "O1", "O2", "O3", "O5"]


class Broken(Exception):
    pass


def breaks(patch, owner, name, calls=0, after=False):
    """Make ``owner.name`` raise in its call number ``calls``, at once or ``after`` it has done its work."""
    original = getattr(owner, name)
    left = calls

    def fail(*args, **kwargs):
        nonlocal left
        left -= 1
        if left >= 0:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise Broken

    patch.setattr(owner, name, fail)


#: Where memory may run out, or an interrupt comes: the arguments of :func:`breaks`.
PLACES = {
    "casting the first tensor": (casting, "_cast"),
    "casting a later tensor": (casting, "_cast", 3),
    "after a master was made": (casting, "ensure_master", 2, True),
    "attaching the model": (session_objects, "set_policy"),
    "giving the optimizer a master": (groups, "model_tensor", 2),
    "attaching the optimizer": (groups, "match_state"),
    "watching wrappers": (ddp, "install"),
    "beginning the casts": (session_objects, "begin_casts"),
    "after the casts have begun": (session_objects, "begin_casts", 0, True),
}
#: Levels at which a place is reached, where these are not all.
LEVELS_OF_PLACES = {
    "casting the first tensor": ["O2", "O3", "O5"],
    "casting a later tensor": ["O2", "O3", "O5"],
    "after a master was made": ["O2", "O5"],
}


def made(steps=1):
    """A model that was trained without amp, so that its optimizer has state."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with amp.disable_casts():  # of models at O1 that are alive
        for _ in range(steps):
            model(torch.ones(3, 6)).sum().backward()
            sgd.step()
    sgd.zero_grad()
    return model, sgd


def everything(model, sgd):
    """What a run ends with, to be compared to the bit."""
    tensors = [*model.state_dict().values(), *model.parameters(), *model.buffers(), *amp.master_params(sgd)]
    for held in sgd.state.values():
        tensors += [value for value in held.values() if isinstance(value, torch.Tensor)]
    groups = [[param.dtype for param in group["params"]] for group in sgd.param_groups]
    scale = amp.state_dict()["loss_scaler0"]  # after it come the scalers of other runs whose optimizers are alive
    return [tensor.detach().clone() for tensor in tensors], (groups, scale, type(model.forward))


def fails_and_is_repaired(monkeypatch, place, model, sgd, **options):
    """Call ``initialize`` until it breaks at ``place``, and again; return whether it broke."""
    broke = False
    with monkeypatch.context() as patch:
        breaks(patch, *PLACES[place])
        try:
            amp.initialize(model, sgd, verbosity=0, **options)
        except Broken:
            broke = True
    if broke:
        amp.initialize(model, sgd, verbosity=0, **options)
    return broke


@pytest.mark.rotate(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_failure_half_way_is_repaired_by_the_same_call(level, place, monkeypatch):
    model, sgd = made()
    broke = fails_and_is_repaired(monkeypatch, place, model, sgd, opt_level=level)
    assert broke is (level in LEVELS_OF_PLACES.get(place, LEVELS))
    train(model, sgd)
    got = everything(model, sgd)
    twin, twin_sgd = made()
    amp.initialize(twin, twin_sgd, opt_level=level, verbosity=0)
    train(twin, twin_sgd)
    want = everything(twin, twin_sgd)
    assert same(got[0], want[0])
    assert got[1] == want[1]


@pytest.mark.cover(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", ["O1", "O2"])
def test_a_failure_at_another_level_is_repaired_too(first, level, place, monkeypatch):
    def trained():
        model, sgd = made()
        amp.initialize(model, sgd, opt_level=first, verbosity=0)
        train(model, sgd)
        return model, sgd

    model, sgd = trained()
    fails_and_is_repaired(monkeypatch, place, model, sgd, opt_level=level)
    train(model, sgd)
    got = everything(model, sgd)
    twin, twin_sgd = trained()
    amp.initialize(twin, twin_sgd, opt_level=level, verbosity=0)
    train(twin, twin_sgd)
    want = everything(twin, twin_sgd)
    assert same(got[0], want[0])
    assert got[1] == want[1]


@pytest.mark.parametrize("break_at", [(session_objects, "set_policy", 1), (groups, "match_state", 1)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_failure_between_two_models_or_optimizers(level, break_at, monkeypatch):
    def initialized(fails):
        models, optimizers = zip(made(), made(), strict=True)
        if fails:
            with monkeypatch.context() as patch:
                breaks(patch, *break_at)
                with pytest.raises(Broken):
                    amp.initialize(list(models), list(optimizers), opt_level=level, verbosity=0)
        amp.initialize(list(models), list(optimizers), opt_level=level, verbosity=0)
        ends = []
        for model, sgd in zip(models, optimizers, strict=True):
            train(model, sgd)
            ends += everything(model, sgd)[0]
        return ends

    assert same(initialized(fails=True), initialized(fails=False))


@pytest.mark.parametrize("place", ["casting a later tensor", "attaching the optimizer", "after the casts have begun"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_scale_that_was_loaded_before_is_restored_by_the_call_that_succeeds(level, place, monkeypatch):
    model, sgd = made()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    fails_and_is_repaired(monkeypatch, place, model, sgd, opt_level=level, loss_scale="dynamic")
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}}


@pytest.mark.parametrize("first", ["O1", "O2", "O4"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4"])
def test_a_failure_beside_a_running_model(level, first, monkeypatch):
    """The running model computes on in between, with the casts of a call that did not fail."""

    def run(fails):
        running, running_sgd = made()
        amp.initialize(running, running_sgd, opt_level=first, verbosity=0)
        train(running, running_sgd)
        model, sgd = made()
        if fails:
            with monkeypatch.context() as patch:
                breaks(patch, *PLACES["after the casts have begun"])
                with pytest.raises(Broken):
                    amp.initialize(model, sgd, opt_level=level, verbosity=0)
        train(running, running_sgd)
        amp.initialize(model, sgd, opt_level=level, verbosity=0)
        train(model, sgd)
        train(running, running_sgd)
        product = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        return everything(running, running_sgd)[0], everything(model, sgd)[0], product

    got = run(fails=True)
    want = run(fails=False)
    assert same(got[0], want[0])
    assert same(got[1], want[1])
    assert got[2] == want[2]


REFUSED = {
    "an entry of a list": (TypeError, {"opt_level": "O1"}),
    "a module to keep": (ValueError, {"opt_level": "O2", "keep_fp32": "nosuch"}),
    "an optimizer": (TypeError, {"opt_level": "O2", "optimizers": object()}),
    "a count": (ValueError, {"opt_level": "O2", "num_losses": -1}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_has_changed_nothing(what, monkeypatch, torch_state):
    model, sgd = made()
    error, options = REFUSED[what]
    if what == "an entry of a list":
        monkeypatch.setattr(torch_overrides, "FP16_FUNCS", [*torch_overrides.FP16_FUNCS, 7])

    def seen():
        return {
            "torch": torch_state(),
            "class": type(model),
            "modules": [sorted(module.__dict__) for module in model.modules()],
            "tensors": [(id(tensor), tensor.dtype) for tensor in (*model.parameters(), *model.buffers())],
            "groups": [[id(param) for param in group["params"]] for group in sgd.param_groups],
            "methods": sorted(sgd.__dict__),
            "amp": view(),
            "sizes": sizes_of_state(),
        }

    before = seen()
    with pytest.raises(error):
        amp.initialize(model, **{"optimizers": sgd, **options})
    assert seen() == before
