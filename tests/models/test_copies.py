"""Copies of a model under amp are models under amp, with weights of their own."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from amp_training import assert_masters_agree
from nets import LEVELS, MASTER_LEVELS, Child, Net, Routed, Tied, batch, made, train
from python_process import run_python
from torch import nn

from ampcompat import amp
from ampcompat.parallel import LARC

pytestmark = pytest.mark.torch


class Proxy(nn.Module):
    """Hands unknown attributes on to a wrapped module, as many wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Slotted(Net):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "gain", 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class OwnDeepcopy(Net):
    copies = 0

    def __deepcopy__(self, memo: dict) -> "OwnDeepcopy":
        new = type(self)()
        new.load_state_dict(self.state_dict())
        new.copies = self.copies + 1
        return new


class OwnReduce(Net):
    def __reduce__(self) -> tuple:
        return (restored, (self.state_dict(),))


def restored(state: dict) -> "OwnReduce":
    model = OwnReduce()
    model.load_state_dict(state)
    return model


class OwnState(Net):
    def __getstate__(self) -> dict:
        kept = dict(self.__dict__)
        kept.pop("scratch", None)
        return kept

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.scratch = "made anew"


class Registered(Net):
    registry: list[type] = []

    def __init_subclass__(cls, *, key: str, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        Registered.registry.append(cls)


class RegisteredChild(Registered, key="child"):
    pass


class Meta(type):
    made: list[str] = []

    def __new__(mcs, name: str, bases: tuple, body: dict, **kwargs: object) -> type:
        mcs.made.append(name)
        return super().__new__(mcs, name, bases, body, **kwargs)


class WithMeta(Net, metaclass=Meta):
    pass


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = pytest.mark.parametrize("way", [copy.deepcopy, by_pickle, by_torch], ids=["deepcopy", "pickle", "torch.save"])


@WAYS
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_computes_the_same_and_with_its_own_weights(level, way):
    model, optimizer = made(level=level)
    train(model, optimizer, 2)
    model.eval()
    clone = way(model)
    assert type(clone).__name__ == "Net"
    assert isinstance(clone, Net)
    for (name, value), (_, other) in zip(model.state_dict().items(), clone.state_dict().items(), strict=True):
        assert torch.equal(value, other), name
    if level in MASTER_LEVELS:
        assert_masters_agree(clone)
    before = model(batch())
    assert torch.equal(clone(batch()), before)
    with torch.no_grad():
        clone.head.weight.zero_()
        clone.head.bias.fill_(1.0)
    assert torch.equal(clone(batch()), torch.ones(8, 2).to(before.dtype))
    assert torch.equal(model(batch()), before)


@WAYS
@pytest.mark.parametrize("kind", [Child, Routed, OwnState, Tied, WithMeta, OwnDeepcopy, OwnReduce])
def test_unusual_classes_survive(kind, way):
    """Their copies compute with their own weights, also where ``forward`` is an attribute of the instance."""
    model, optimizer = made(kind)
    train(model, optimizer, 2)
    model.eval()
    clone = way(model)
    assert isinstance(clone, kind)
    out = model(batch())
    assert out.dtype == torch.float32
    # A class that builds its own copies builds plain float32 ones; they agree to half precision.
    plain = (kind is OwnDeepcopy and way is copy.deepcopy) or (kind is OwnReduce)
    clone.eval()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    torch.testing.assert_close(clone(batch()), out, rtol=2e-3 if plain else 0, atol=2e-3 if plain else 0)


def test_proxies_that_define_getattr():
    torch.manual_seed(0)
    model = Proxy(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, 2)
    assert model.head is model.module.head
    clone = copy.deepcopy(model)
    clone.eval(), model.eval()
    assert torch.equal(clone(batch()), model(batch()))


def test_slots_keep_their_values():
    model, optimizer = made(Slotted)
    train(model, optimizer, 2)
    model.gain = 0.0
    assert torch.equal(model(batch()), torch.zeros(8, 2))


def test_registries_do_not_see_the_subclass():
    known, made_before = list(Registered.registry), list(Meta.made)
    model, optimizer = made(RegisteredChild)
    train(model, optimizer, 2)
    other, optimizer = made(WithMeta)
    train(other, optimizer, 2)
    assert Registered.registry == known
    assert Meta.made == made_before
    assert isinstance(copy.deepcopy(model), RegisteredChild)


def test_a_deepcopy_of_a_submodule_is_half_with_masters():
    model, optimizer = made()
    train(model, optimizer, 2)
    part = copy.deepcopy(model.head)
    assert part.weight.dtype == torch.float16
    assert torch.equal(part.state_dict()["weight"], model.state_dict()["head.weight"])


@WAYS
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_and_its_optimizer_copied_together_train_on(level, way):
    """The copies are initialized first: torch's optimizers copy groups and state, and no instance attributes."""
    model, optimizer = made(level=level)
    train(model, optimizer, 2)
    model2, optimizer2 = way((model, optimizer))
    model2, optimizer2 = amp.initialize(model2, optimizer2, opt_level=level, verbosity=0)
    train(model, optimizer, 2, seed=50)
    train(model2, optimizer2, 2, seed=50)
    for a, b in zip(amp.master_params(optimizer), amp.master_params(optimizer2), strict=True):
        assert torch.equal(a, b)
    for (name, a), (_, b) in zip(model.state_dict().items(), model2.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from nets import batch
for path in sys.argv[2:]:
    model = torch.load(path, weights_only=False)
    torch.save(dict(out=model(batch()), state=model.state_dict()), path)
"""


@pytest.mark.on_cpu
def test_saved_whole_and_loaded_in_a_fresh_process(tmp_path):
    wanted = {}
    for level in LEVELS:
        model, optimizer = made(level=level)
        train(model, optimizer, 2)
        model.eval()
        path = tmp_path / f"{level}.pt"
        torch.save(model, path)
        wanted[path] = model(batch()), {k: v.clone() for k, v in model.state_dict().items()}
    here = Path(__file__).parent
    run = run_python(["-c", SCRIPT, here, *wanted])
    assert run.returncode == 0, run.stderr
    for path, (out, state) in wanted.items():
        got = torch.load(path, weights_only=True)
        assert torch.equal(got["out"], out), path.name
        assert all(torch.equal(got["state"][name], value) for name, value in state.items()), path.name


WRITES_THROUGH_DATA = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import nets
model = torch.load(sys.argv[2], weights_only=False)
model.head.weight.data.fill_(0.5)
sys.exit(0 if (model.state_dict()["head.weight"] == 0.5).all() else "the write was not seen")
"""


@pytest.mark.on_cpu
def test_a_write_through_data_is_seen_in_a_fresh_process(tmp_path):
    model, _ = made(level="O2")
    path = tmp_path / "model.pt"
    torch.save(model, path)
    arguments = ["-c", WRITES_THROUGH_DATA, Path(__file__).parent, path]
    run = run_python(arguments)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_replicas_compute_the_same(level):
    import threading

    model, optimizer = made(level=level)
    train(model, optimizer, 2)
    model.eval()
    x = batch()
    expected = model(x)
    replica = model._replicate_for_data_parallel()
    for name, module in model.named_children():
        setattr(replica, name, module)
    enabled = torch.is_autocast_enabled(x.device.type)
    result = []

    def work():  # as torch's parallel_apply does; it hands on whether autocast is enabled, not its dtype
        with torch.autocast(x.device.type, enabled=enabled):
            result.append(replica(x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(result[0], expected)


def test_deriving_from_an_amp_class_registers_once():
    """``__init_subclass__`` of the model's base class sees a class that a script derives from the model's."""
    model, _ = made(RegisteredChild)
    known = list(Registered.registry)

    class Grandchild(type(model), key="grandchild"):
        pass

    assert Registered.registry == [*known, Grandchild]
    Registered.registry.remove(Grandchild)


def test_new_objects_of_the_models_class_are_plain():
    """``type(model)()`` makes a model without amp."""
    model, _ = made()
    other = type(model)()
    assert other(batch()).dtype == other.head.weight.dtype == torch.float32


def test_a_bound_forward_works_after_amp_is_left():
    """``model.forward`` was stored while the model was under amp."""
    model, optimizer = made(Routed)
    forward = model.forward
    assert forward(batch()).dtype == torch.float32
    amp.initialize(model, optimizer, enabled=False)
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(forward(batch()), model(batch()))


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.full((4,), 1 / 3))

    def forward(self, x):
        return self.layer(x - self.mean)


def test_masters_made_under_inference_mode_can_be_trained():
    model = amp.initialize(nn.Linear(4, 4), opt_level="O2", verbosity=0)
    with torch.inference_mode():
        model.state_dict()
    model(torch.randn(2, 4)).sum().backward()
    assert model.weight.grad is not None


@WAYS
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_made_under_inference_mode_is_one_with_masters(level, way):
    """In plain torch its tensors could not be trained; those with masters can."""
    model, optimizer = made(Affine, level)
    train(model, optimizer, 2)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        clone = way(model)
        assert torch.equal(clone(batch()), model(batch()))
    assert torch.equal(clone.eval()(batch()), model.eval()(batch()))
    for name, value in clone.state_dict().items():
        assert torch.equal(value, want[name]), name
    if level in MASTER_LEVELS:
        assert_masters_agree(clone)
        optimizer = torch.optim.SGD(clone.parameters(), lr=0.1)
        clone, optimizer = amp.initialize(clone, optimizer, opt_level=level, verbosity=0)
        train(clone, optimizer, 2)
        assert_masters_agree(clone, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_buffer_assigned_in_inference_mode_is_saved(level):
    model, _optimizer = made(Affine, level)
    model.state_dict()
    with torch.inference_mode():
        model.mean = model.mean + 1
        model(batch())
    assert torch.equal(model.state_dict()["mean"].to(model.mean.dtype), model.mean)
    assert_masters_agree(model)


def test_a_copy_under_an_optimizer_of_its_own():
    """An optimizer that ``initialize`` was not given steps half weights, and the masters follow; no block takes it."""
    model, _ = made(loss_scale=8.0)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    before = [p.detach().clone() for p in copied.parameters()]
    copied(batch(0)).float().pow(2).mean().backward()
    optimizer.step()
    assert not all(torch.equal(old, new) for old, new in zip(before, copied.parameters(), strict=True))
    copied(batch(1))
    assert_masters_agree(copied)
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(torch.ones(()), optimizer):
        pass


@WAYS
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_is_taken_out_of_amp(level, way):
    model, optimizer = made(level=level)
    train(model, optimizer, 2)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    clone = way(model)
    for _ in range(2):  # the second call finds a plain model
        assert amp.initialize(clone, enabled=False) is clone
        assert type(clone) is Net
        assert all(param.dtype == torch.float32 for param in clone.parameters())
        assert all(torch.equal(value, want[name]) for name, value in clone.state_dict().items())
    if level in MASTER_LEVELS:
        assert_masters_agree(model, optimizer)
    train(model, optimizer, 1)
    assert all(torch.equal(value, want[name]) for name, value in clone.state_dict().items())
    with amp.disable_casts():
        assert clone(batch()).dtype == torch.float32


# -- with the optimizer ------------------------------------------------------------------------------------------------
def in_a_plain_loop(model, optimizer):
    """A step of a script that does not know of amp: a trainer that was pickled whole, and is resumed."""
    optimizer.zero_grad()
    model(batch()).float().pow(2).mean().backward()
    optimizer.step()


@WAYS
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_with_its_optimizer_trains_or_its_first_step_says_what_to_do(level, way):
    both = made(level=level, loss_scale=128.0)
    train(*both, 2)
    model, optimizer = way(both)
    before = copy.deepcopy(model.state_dict())
    if level in MASTER_LEVELS:
        message = (
            r"SGD.step\(\) with masters that have no gradients - .* - call amp.initialize\(model, optimizer, opt_level="
        )
        with pytest.raises(RuntimeError, match=message):
            in_a_plain_loop(model, optimizer)
        optimizer.zero_grad()
        model.zero_grad()
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        train(model, optimizer)
    else:
        in_a_plain_loop(model, optimizer)
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])
    train(*both)  # the original goes on


@WAYS
def test_a_copy_with_its_optimizer_trains_as_the_original_does(way):
    both = made(loss_scale=128.0)
    train(*both, 2)
    model, optimizer = way(both)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    train(model, optimizer, 2)
    train(*both, 2)
    for value, other in zip(model.state_dict().values(), both[0].state_dict().values(), strict=True):
        assert torch.equal(value, other)


def test_a_script_that_fills_gradients_of_masters_itself_may_step():
    model, optimizer = by_pickle(made())
    before = copy.deepcopy(model.state_dict())
    model(batch()).float().pow(2).mean().backward()
    for master in amp.master_params(optimizer):
        master.grad = amp.model_param(master).grad.float()
    optimizer.step()
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])


@WAYS
def test_an_optimizer_that_was_made_for_a_copy_steps_its_half_weights(way):
    model = way(made()[0])
    before = model.head.weight.detach().clone()
    in_a_plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.equal(before, model.head.weight)


def test_an_optimizer_inside_one_that_amp_knows_steps_where_models_are_copied():
    model = Net()
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    copy.deepcopy(model)
    train(model, optimizer, 2)
    optimizer.step()
