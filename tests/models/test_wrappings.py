"""What users and torch put around, on, or into a model goes on working."""

import copy
import pickle
import warnings

import pytest
import torch
from amp_training import assert_masters_agree, initialized, make_step
from nets import CAST_LEVELS, LEVELS, MASTER_LEVELS, Child, Net, Routed, Tied, batch, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ampcompat import amp

pytestmark = pytest.mark.torch

#: The dtype of what a model returns at the levels that cast functions; at the others it is float32.
OUTPUTS = {"O1": torch.float16, "O4": torch.bfloat16}


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_stays_what_it_was(level):
    torch.manual_seed(0)
    model = Child()
    text, names = repr(model), [name for name, _ in model.named_modules()]
    same, _ = initialized(model, level)
    assert same is model
    assert isinstance(model, Child)
    assert repr(model) == text
    assert [name for name, _ in model.named_modules()] == names
    assert model.__class__.__name__ == "Child"
    assert model.__class__.__module__ == Child.__module__
    plain = Child()
    assert type(plain) is Child
    assert plain(batch()).dtype == OUTPUTS.get(level, torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [Net, Child, Routed])
def test_a_direct_call_of_forward_is_the_models_own(level, kind):
    torch.manual_seed(0)
    model, _ = initialized(kind(), level)
    model.eval()
    out = model.forward(batch())
    assert out.dtype == OUTPUTS.get(level, torch.float32)
    assert torch.equal(out, model(batch()))


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_a_forward_patched_after_initialize_is_called(level):
    model, _ = initialized(Net(), level)
    model.forward = lambda x: x.new_ones(1)
    assert model(batch()).item() == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_from_before_and_after(level):
    torch.manual_seed(0)
    model, seen = Net(), []
    model.register_forward_hook(lambda m, i, o: seen.append(("before", o.dtype)))
    model.head.register_forward_pre_hook(lambda m, i: seen.append(("head", i[0].dtype)))
    model, optimizer = initialized(model, level)
    model.register_forward_hook(lambda m, i, o: seen.append(("after", o.dtype)))
    model.head.register_full_backward_hook(lambda m, i, o: seen.append(("backward", o[0].dtype)))
    train(model, optimizer, 1)
    assert [name for name, _ in seen] == ["head", "before", "after", "backward"]
    if level in CAST_LEVELS:
        half = torch.bfloat16 if level == "O5" else torch.float16
        assert dict(seen) == {"head": half, "before": torch.float32, "after": torch.float32, "backward": half}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_model_compiled_before_initialize(level):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net()
        given = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        given, optimizer = initialized(given, level)
        train(given, optimizer, 3)
        results.append([p.detach().clone() for p in model.parameters()])
        if level in MASTER_LEVELS:
            assert_masters_agree(model, optimizer)
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        assert eager.dtype == compiled.dtype
        # Compiled backward passes may sum in another order.
        torch.testing.assert_close(eager.float(), compiled.float(), rtol=4e-3, atol=4e-3)


def write_values(model):
    """As an average of weights does."""
    for value in model.state_dict().values():
        value.fill_(0.5)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_compiled_forward_after_sync_masters(level):
    """It does not look itself whether masters were written."""
    torch._dynamo.reset()
    model, _optimizer = initialized(nn.Linear(4, 4, bias=False), level)
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(torch.ones(1, 4))
    write_values(model)
    amp.sync_masters(model)
    assert torch.equal(run(torch.ones(1, 4)), torch.full((1, 4), 2.0))
    assert_masters_agree(model)
    torch._dynamo.reset()


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


WRAPS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "own": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
    "old weight_norm": old_weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", WRAPS)
def test_parametrizations_train(level, kind):
    torch.manual_seed(0)
    model = nn.Sequential(WRAPS[kind](nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    before = [p.detach().clone().float() for p in model.parameters()]
    model, optimizer = initialized(model, level)
    train(model, optimizer, 3)
    out = model(batch())
    assert out.isfinite().all()
    assert any(not torch.equal(a, b.detach().float()) for a, b in zip(before, model.parameters(), strict=True))
    if level in MASTER_LEVELS:
        assert_masters_agree(model, optimizer)


def test_a_late_parametrization_keeps_the_master():
    """It is registered after ``initialize``."""
    torch.manual_seed(0)
    model, optimizer = initialized(Net(), "O2")
    parametrize.register_parametrization(model.head, "weight", Doubled())
    before = [p.clone() for p in amp.master_params(optimizer)]
    train(model, optimizer, 2)
    assert all(not torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    assert_masters_agree(model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", WRAPS)
def test_a_model_that_is_parametrized_later_is_initialized_again(level, kind):
    """What is added is made of the half weights that amp has cast: the script did not call ``half()``."""
    model, optimizer = initialized(Net(), level)
    train(model, optimizer, 1)
    WRAPS[kind](model.head)
    model, optimizer = initialized(model, level)
    before = [p.detach().clone() for p in model.head.parameters()]
    train(model, optimizer, 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.head.parameters(), strict=True))
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {torch.float32}
    for master in amp.master_params(optimizer):
        weight = amp.model_param(master)
        assert torch.equal(master.to(weight.dtype), weight)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrized_root(level, when):
    """A model whose own weight is parametrized, before ``initialize`` or after."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if when == "before":
        parametrize.register_parametrization(model, "weight", Symmetric())
    model, optimizer = initialized(model, level)
    if when == "after":
        parametrize.register_parametrization(model, "weight", Symmetric())
    train(model, optimizer, 2)
    return model, optimizer


ROOTS = pytest.mark.parametrize("when", ["before", "after"])


@ROOTS
@pytest.mark.parametrize("level", LEVELS)
def test_parametrizations_of_a_root_can_be_removed(level, when):
    model, optimizer = parametrized_root(level, when)
    want = model.eval()(batch())
    parametrize.remove_parametrizations(model, "weight")
    assert type(model).__name__ == "Linear"
    assert torch.equal(model(batch()), want)
    before = model.state_dict()["weight"].clone()
    train(model, optimizer, 2)
    assert not torch.equal(model.state_dict()["weight"], before)
    if level in MASTER_LEVELS:
        assert_masters_agree(model, optimizer)
    assert type(amp.unwrap(model)) is nn.Linear
    amp.initialize(model, optimizer, enabled=False)
    assert type(model) is nn.Linear


@ROOTS
@pytest.mark.parametrize("level", LEVELS)
def test_a_parametrized_root_can_be_copied(level, when):
    model, _ = parametrized_root(level, when)
    clone = copy.deepcopy(model)
    assert torch.equal(clone(batch()), model(batch()))
    assert clone(batch()).dtype == initialized(nn.Linear(4, 4), level)[0](batch()).dtype


@ROOTS
@pytest.mark.parametrize("leave", ["unwrap", "enabled=False"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_parametrized_root_can_leave_amp(level, leave, when):
    model, optimizer = parametrized_root(level, when)
    reference = nn.Linear(4, 4)
    parametrize.register_parametrization(reference, "weight", Symmetric())
    reference.load_state_dict(model.state_dict())
    if leave == "unwrap":
        plain = amp.unwrap(model)
    else:
        plain, _ = amp.initialize(model, optimizer, enabled=False)
    assert parametrize.is_parametrized(plain)
    assert parametrize.type_before_parametrizations(plain) is nn.Linear
    with amp.disable_casts():
        assert torch.equal(plain(batch()), reference(batch()))
    parametrize.remove_parametrizations(plain, "weight")
    assert type(plain) is nn.Linear
    assert b"ampcompat" not in pickle.dumps(plain)
    if plain is model:
        before = plain.weight.detach().clone()
        optimizer.zero_grad()
        plain(batch()).sum().backward()
        optimizer.step()
        assert not torch.equal(plain.weight, before)


def test_leaving_amp_keeps_a_derived_class():
    """A script derived the class from the class of a model under amp."""
    model, _ = initialized(nn.Linear(4, 4), "O2")

    class Derived(type(model)):
        pass

    own = Derived(4, 4)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    amp.initialize(own, optimizer, opt_level="O2", verbosity=0)
    amp.initialize(own, optimizer, enabled=False)
    assert type(own) is Derived
    assert own(batch()).dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_nested_models_in_one_list(level):
    """The part gives float32 outputs, as in apex, to code outside and to the model around it."""
    torch.manual_seed(0)
    inputs = batch().shape[-1]
    model = nn.Sequential(nn.Linear(inputs, inputs), Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (outer, inner), optimizer = amp.initialize([model, model[1]], optimizer, opt_level=level, verbosity=0)
    assert inner is outer[1]
    train(outer, optimizer, 2)
    assert inner(batch()).dtype == OUTPUTS.get(level, torch.float32)
    if level in MASTER_LEVELS:
        assert_masters_agree(outer, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_script_modules_are_passed_through_with_a_message(level, capsys):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")  # deprecated, by a category that changes with the version
        scripted = torch.jit.script(Net())
    model, optimizer = initialized(scripted, level)
    assert model is scripted
    assert "A ScriptModule runs as it was scripted" in capsys.readouterr().out
    train(model, optimizer, 2)


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("level", LEVELS)
def test_a_scripted_part_without_weights_trains(level):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        part = torch.jit.script(Doubling())
    torch.manual_seed(0)
    model, optimizer = initialized(nn.Sequential(nn.Linear(4, 8), part, nn.Linear(8, 2)), level)
    torch.manual_seed(0)
    twin, twin_optimizer = initialized(nn.Sequential(nn.Linear(4, 8), Doubling(), nn.Linear(8, 2)), level)
    train(model, optimizer, 2)
    train(twin, twin_optimizer, 2)
    same = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    amp.initialize(model, optimizer, enabled=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_functional_call(level):
    torch.manual_seed(0)
    model, optimizer = initialized(Net(), level)
    train(model, optimizer, 2)
    model.eval()
    want = model(batch())
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert torch.equal(torch.func.functional_call(model, own, (batch(),)), want)
    fast = {name: (value.detach() * 0).requires_grad_() for name, value in own.items() if "head" in name}
    out = torch.func.functional_call(model, fast, (batch(),))
    assert torch.equal(out, torch.zeros_like(out))
    grads = torch.autograd.grad(out.float().sum(), list(fast.values()))
    assert all(g.abs().sum() > 0 for g in grads)
    assert torch.equal(model(batch()), want)
    assert all(torch.equal(a, b) for a, b in zip(masters, amp.master_params(optimizer), strict=True))


def test_an_error_of_the_script_is_not_laid_to_a_float32_weight():
    class Raising(nn.Linear):
        def forward(self, x):
            raise RuntimeError("an error of my own")

    model = amp.initialize(Raising(2, 2), opt_level="O2", verbosity=0)
    model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="of my own") as found:
        model(torch.zeros(1, 2))
    assert not getattr(found.value, "__notes__", ())


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_float32_weights_in_a_half_model(level):
    """torch's own error has a note that says what to pass to ``functional_call``."""
    model, optimizer = initialized(Net(), level)
    train(model, optimizer, 2)
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    with pytest.raises(RuntimeError, match="dtype|type") as found:
        torch.func.functional_call(model, model.state_dict(), (batch(),))
    said = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    assert "the forward of a half model needs half weights - pass functional_call values cast to" in said
    train(model, optimizer, 2)
    if level == "O3":
        model.float()
        with pytest.raises(RuntimeError, match="dtype|type"):
            model(batch())
    else:
        assert not any(torch.equal(a, b) for a, b in zip(masters, amp.master_params(optimizer), strict=True))


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", [Net, Tied])
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_functional_call_with_parameters_of_another_model(level, ran, kind):
    """They are lent for one forward: no weight, and no master, is another afterwards."""
    torch.manual_seed(0)
    model, optimizer = initialized(kind(), level)
    train(model, optimizer, 2)
    teacher = copy.deepcopy(model).eval()
    if ran:
        teacher(batch())
    with torch.no_grad():
        for tensor in (*teacher.parameters(), *teacher.buffers()):
            tensor.mul_(2)
    lent = dict(teacher.named_parameters()) | dict(teacher.named_buffers())
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    before = {name: value.clone() for name, value in lent.items()}
    model.eval()
    for _ in range(2):
        out = torch.func.functional_call(model, lent, (batch(),))
        assert torch.equal(out, teacher(batch()))
        model(batch())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in lent.items())
    if level in MASTER_LEVELS:
        assert_masters_agree(model, optimizer)
        assert_masters_agree(teacher)


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_an_ensemble_by_vmap_over_functional_call(level):
    torch.manual_seed(0)
    model, _ = initialized(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), level)
    stacked = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in model.named_parameters()}
    data = batch()
    out = torch.func.vmap(lambda p: torch.func.functional_call(model, p, (data,)))(stacked)
    assert out.dtype == torch.float32
    # Batched half products may be summed in another order.
    torch.testing.assert_close(out[0], model(batch()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_model_whose_parameters_method_returns_groups(level):
    """Scripts give such a model's ``parameters()`` to the optimizer, with a learning rate for each part."""

    class Grouped(torch.nn.Linear):
        def parameters(self, recurse=True):
            return [{"params": [self.weight], "lr": 0.1}, {"params": [self.bias], "lr": 0.2}]

    model = Grouped(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    make_step(optimizer, model(torch.ones(1, 2)).float().sum())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
