"""One test for each cell of the table at the head of ``casts/ambience.py``; each fails without its cure."""

import copy
import gc
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from o1_casts import here
from python_process import run_python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ampcompat import _torch
from ampcompat.amp import _amp_state, disable_casts, init, initialize, scale_loss
from ampcompat.amp.casts import ambience
from ampcompat.amp.casts.contexts import casts_off

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF, FLOAT = torch.float16, torch.float32


def product(device=None):
    """The dtype that code standing here gets from a matrix product of float32 matrices."""
    a = torch.zeros(2, 2, device=device)
    return torch.mm(a, a).dtype


class Probe(nn.Module):
    """Notes the dtype of a product inside its forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x):
        self.seen.append(product(x.device))
        return self.fc(x)


class Elsewhere(nn.Module):
    """The same on another device type, under fake tensors."""

    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, device=device))
        self.seen = []

    def forward(self, x):
        self.seen.append(product(x.device))
        return x


def at(level, model=None, **kw):
    model = Probe() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return initialize(model, optimizer, opt_level=level, verbosity=0, **kw)


# -- anywhere else in Python ----------------------------------------
LEVELS = [("O0", FLOAT), ("O1", HALF), ("O2", FLOAT), ("O3", FLOAT), ("O4", torch.bfloat16)]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_ambient_code_and_the_block_follow_the_level(level, dtype):
    model, optimizer = at(level)
    assert product() == dtype
    with scale_loss(model(torch.randn(2, 4)).float().sum(), optimizer) as scaled:
        assert product() == dtype
        scaled.backward()
        assert product() == dtype
    assert product() == dtype


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_casts_outside_models_survive_a_call_without_casts(level):
    """A teacher or a critic at another level does not end the casts that the losses of the first model need."""
    first, _ = at("O1")
    second, _ = at(level)
    assert product() == HALF
    first(torch.randn(2, 4))
    second(torch.randn(2, 4))
    assert first.seen == [HALF]
    assert second.seen == [FLOAT]
    assert product() == HALF


def test_the_latest_session_with_casts_decides_outside_models():
    first, _ = at("O1")
    second, _ = at("O4")
    assert product() == torch.bfloat16
    first(torch.randn(2, 4))
    assert first.seen == [HALF]
    del second
    gc.collect()
    assert product() == HALF
    at("O0", first)
    assert product() == FLOAT


def test_casts_end_with_the_last_model(torch_state):
    _masters = at("O2")  # the patches that masters need stay
    before = torch_state()
    model, _ = at("O1")
    average = copy.deepcopy(model)
    teacher, _ = at("O2")
    del model
    gc.collect()
    assert product() == HALF  # a copy of it is alive
    del average
    gc.collect()
    assert product() == FLOAT
    teacher(torch.randn(2, 4))
    assert teacher.seen == [FLOAT]
    del teacher
    _held = at("O0")
    assert torch_state() == before


def test_a_model_collected_in_another_thread_ends_the_casts_at_the_next_block():
    held = [at("O1")[0]]
    model, optimizer = at("O2")
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    with scale_loss(model(torch.randn(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    assert product() == FLOAT


def test_a_model_collected_while_the_end_of_another_is_followed(monkeypatch):
    """The garbage collector may run at any allocation, in the look at the models that are alive, too."""
    first, second = [at("O1")[0]], [at("O1")[0]]

    def latest_casts():
        found = original()
        second.clear()
        gc.collect()
        return found

    original = ambience._latest_casts
    monkeypatch.setattr(ambience, "_latest_casts", latest_casts)
    first.clear()
    gc.collect()
    assert product() == FLOAT


def test_casts_without_a_model_last_until_they_are_undone():
    handle = init()
    _held = at("O0")
    assert product() == HALF
    handle._deactivate()
    assert product() == FLOAT


@pytest.mark.parametrize("then", ["region", "block"])
def test_initialize_inside_a_region(then):
    """The region restores the state that it found; the next region that ends, or block, turns the casts on again."""
    with torch.autocast(here(), dtype=torch.bfloat16):  # Python has looked its __exit__ up before it is patched
        model, optimizer = at("O1")
    if then == "region":
        with torch.autocast(here(), dtype=torch.bfloat16):
            assert product() == torch.bfloat16
        assert product() == HALF
        return
    with scale_loss(model(torch.randn(2, 4)).float().sum(), optimizer) as scaled:
        assert product() == HALF
        scaled.backward()
    assert product() == HALF


def test_deactivate_ends_everything(torch_state):
    before = torch_state()
    model, _ = at("O1")
    assert torch_state() != before
    _amp_state.handle._deactivate()
    left = {name for name, value in torch_state().items() if value != before[name]}
    assert left == {"Module.zero_grad", "hooks of steps"}  # loss scaling goes on
    assert product() == FLOAT
    model(torch.randn(2, 4))
    assert model.seen == [FLOAT]


@pytest.mark.parametrize("later", ["O0", "O1", "O2"])
def test_a_later_call_reactivates_no_earlier_model(later):
    """Each call owns its models; apex patched the whole process."""
    old, _ = at("O1")
    handle = _amp_state.handle
    handle._deactivate()
    new, _ = at(later)
    old(torch.randn(2, 4))
    assert old.seen == [FLOAT]
    assert not handle.is_active()


def test_a_later_call_adds_no_casts_to_uncast_models():
    """Models whose properties cast no functions keep that when a later session at O1 casts them."""
    old, _ = at("O1", patch_torch_functions=False)
    half, _ = at("O2")
    for handle in (_amp_state.handle, init()):
        handle._deactivate()
    _held = at("O1")
    for model in (old, half):
        model(torch.randn(2, 4))
        assert model.seen == [FLOAT]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_region_in_an_uncast_forward(level):
    """The rest of the forward stays uncast after a ``torch.autocast`` region in it has ended."""

    class WithRegion(Probe):
        def forward(self, x):
            with torch.autocast(here(), enabled=False):
                pass
            return super().forward(x)

    model, _ = at(level, WithRegion())
    _held = at("O1")
    model(torch.randn(2, 4))
    assert model.seen == [FLOAT]
    assert product() == HALF


# -- inside forward, in any thread ----------------------------------------
@pytest.mark.parametrize(("level", "dtype"), [("O1", HALF), ("O4", torch.bfloat16), ("O0", FLOAT), ("O2", FLOAT)])
def test_forward_in_a_new_thread(level, dtype):
    model, _ = at(level)
    at("O0" if dtype != FLOAT else "O1")  # the ambience is the other way round
    thread = threading.Thread(target=model, args=(torch.randn(2, 4),))
    thread.start()
    thread.join()
    assert model.seen == [dtype]


@pytest.mark.parametrize("enabled", [True, False])
def test_data_parallel_replica(enabled):
    """torch hands ``enabled`` to the replica's thread, as a region, but not the dtype."""
    model, _ = at("O4")
    if not enabled:
        _held = at("O0")
    replica = model._replicate_for_data_parallel()
    replica.fc = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    device_type = x.device.type

    def worker():
        with torch.autocast(device_type, enabled=torch.is_autocast_enabled(device_type)):
            replica(x)

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert model.seen == [torch.bfloat16]


def test_data_parallel_replica_made_in_a_users_region():
    model, _ = at("O1")
    with torch.autocast(here(), dtype=torch.bfloat16):
        replica = model._replicate_for_data_parallel()
    replica.fc = nn.Linear(4, 4)
    thread = threading.Thread(target=replica, args=(torch.randn(2, 4),))
    thread.start()
    thread.join()
    assert model.seen == [torch.bfloat16]


# -- device types without params ----------------------------------------
def test_cpu_code_beside_a_cuda_model():
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, _ = at("O1", Elsewhere("cuda:0"))
        assert product("cuda:0") == HALF
        assert product("cpu") == FLOAT
        model(torch.zeros(2, 4, device="cuda:0"))
        assert model.seen == [HALF]


@pytest.mark.on_cpu
def test_a_model_that_moves_takes_the_casts_along():
    model, _ = at("O1", Elsewhere("cpu"))
    assert product() == HALF
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.weight = nn.Parameter(torch.zeros(4, 4, device="cuda:0"))
        model(torch.zeros(2, 4, device="cuda:0"))
        assert model.seen == [HALF]
        assert product("cuda:0") == HALF
        assert product("cpu") == FLOAT


class Products(torch.utils.data.Dataset):
    """Its items are dtypes of products in the worker that loads them."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return str(product())


@pytest.mark.on_cpu  # CUDA does not go on in a forked process
def test_forked_worker():
    _held = at("O1")
    loader = torch.utils.data.DataLoader(Products(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [str(FLOAT)] * 2
    assert product() == HALF


# -- the engine ----------------------------------------
class Float32Region(nn.Module):
    """A product in float32 inside a casting model: its backward must be float32 as well."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        with torch.autocast(here(), enabled=False):
            return torch.mm(x, self.weight)


def by_backward(model, loss):
    loss.backward()


def by_autograd_grad(model, loss):
    (model.weight.grad,) = torch.autograd.grad(loss, model.weight)


def by_a_nested_run(model, loss):
    class Nest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            loss.backward()  # an engine run inside a body, in which casts are on again
            return g

    Nest.apply(torch.ones(1, requires_grad=True)).backward()


@pytest.mark.parametrize("run", [by_backward, by_autograd_grad, by_a_nested_run])
def test_backward_of_a_float32_region_is_float32(run):
    torch.manual_seed(0)
    model, _ = at("O1", Float32Region(), loss_scale=1.0)
    x, seed = torch.randn(8, 8), torch.randn(8, 8)
    run(model, (model(x) * seed).sum())
    with disable_casts():
        assert torch.equal(model.weight.grad, torch.mm(x.t(), seed))


def test_engine_restores_casts_after_an_exception():
    _held = at("O1")

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        Fail.apply(torch.ones(1, requires_grad=True)).backward()
    assert product() == HALF


# -- Function bodies ----------------------------------------
class OldStyle(torch.autograd.Function):
    """2019 style: the backward multiplies a half gradient by a float32 weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight.t()), torch.mm(x.t(), grad)


def old_style_step():
    weight = nn.Parameter(torch.randn(4, 4))
    OldStyle.apply(torch.randn(2, 4), weight).float().sum().backward()
    return weight.grad


def test_old_custom_functions_multiply_half_by_float():
    _held = at("O1")
    assert old_style_step() is not None


def test_bodies_follow_the_model_that_ran_them_not_the_ambience():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return OldStyle.apply(x, self.weight)

    casting, _ = at("O1", Net())
    plain, _ = at("O0", Net())
    x = torch.randn(2, 4)
    casting(x).float().sum().backward()  # ambient casts are off now
    plain(x).sum().backward()
    with disable_casts():
        assert torch.equal(plain.weight.grad, torch.mm(x.t(), torch.ones(2, 4)))
    assert casting.weight.grad is not None


def test_bodies_are_uncast_where_casts_are_disabled():
    seen = []

    class Body(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(product(grad.device))
            return grad

    _held = at("O1")
    loss = Body.apply(torch.ones(1, requires_grad=True))
    with disable_casts():
        loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [FLOAT, HALF]


class Noting(torch.autograd.Function):
    """Calls a function in its backward body."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None


class NotingNet(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.fc, self.note = nn.Linear(2, 2), note

    def forward(self, x):
        return Noting.apply(self.fc(x), self.note)


def test_disabled_casts_reach_bodies_in_the_engines_threads():
    """The engine takes another thread for tensors on a device, and for backward passes that are nested deeply."""
    done = run_python([Path(__file__).with_name("nested_backwards.py")])
    assert done.stdout.splitlines() == ["torch.float32 torch.float32", "torch.float16 torch.float16"], done.stderr


def test_a_region_inside_a_body_ends_in_the_casts_of_the_body():
    seen = []
    device_type = here()  # a body may run in a thread of the engine's, which knows of no default device

    def note():
        with torch.autocast(device_type, enabled=False):
            seen.append(product(device_type))
        seen.append(product(device_type))

    model, _ = at("O1", NotingNet(note))
    _other = at("O4")  # the ambience differs from the casts of the model
    model(torch.ones(1, 2)).float().sum().backward()
    assert seen == [FLOAT, HALF]
    assert product() == torch.bfloat16


def test_bodies_see_weights_move():
    """Each body runs without the weight cache, which its forward had."""
    weight = nn.Parameter(torch.ones(2, 2))
    seen = []

    def note():
        with torch.enable_grad():
            seen.append(torch.mm(torch.ones(1, 2, device=weight.device), weight).sum().item())

    model, _ = at("O1", NotingNet(note))
    y = model(torch.ones(1, 2)).float().sum()
    for _ in range(2):
        y.backward(retain_graph=True)
        weight.data.mul_(2)
    assert seen == [4.0, 8.0]


# -- optimizer.step ----------------------------------------
class ProductSGD(torch.optim.SGD):
    """Notes the dtype of a product in its step."""

    def step(self, closure=None):
        self.seen = product()
        return super().step(closure)


def test_step_is_uncast_and_its_closure_is_as_outside():
    model = Probe()
    optimizer = ProductSGD(model.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer, opt_level="O1", verbosity=0)
    closures = []

    def closure():
        closures.append(product())
        optimizer.zero_grad()
        loss = 1e-3 * model(torch.randn(2, 4)).float().sum()
        with scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.seen == FLOAT
    assert closures == [HALF]
    assert model.seen == [HALF]
    assert product() == HALF


# -- disable_casts ----------------------------------------
def test_disable_casts_nests_and_survives_exceptions():
    """The casts come back at the last exit."""
    model, _ = at("O1")
    with disable_casts():
        with disable_casts():
            assert product() == FLOAT
        assert product() == FLOAT
        model(torch.randn(2, 4))
        old_style_step()
    assert model.seen == [FLOAT]
    assert product() == HALF
    with pytest.raises(KeyError), disable_casts():
        raise KeyError
    assert product() == HALF


def test_disable_casts_decorates_functions():
    _held = at("O1")

    @disable_casts()
    def wide(depth):
        """Say what it does."""
        found = [product()]
        return found + wide(depth - 1) if depth else found

    assert wide.__doc__ == "Say what it does."
    for _ in range(2):
        assert wide(2) == [FLOAT] * 3
        assert product() == HALF

    @disable_casts()
    def failing():
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert product() == HALF


def test_disable_casts_in_two_threads():
    """They leave it in the order in which they came."""
    model, _ = at("O1")
    x = torch.randn(2, 4)
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with disable_casts():
            entered.set()
            leave.wait(60)
            model(x)
        model(x)
        seen.extend(model.seen)

    thread = threading.Thread(target=other)
    with disable_casts():
        thread.start()
        entered.wait(60)
        assert product() == FLOAT
    assert product() == HALF
    leave.set()
    thread.join()
    assert seen == [FLOAT, HALF]
    assert product() == HALF


def test_disable_casts_in_a_forward():
    class Featurizer(Probe):
        def forward(self, x):
            with disable_casts(), torch.no_grad():
                self.seen.append(product())
            return super().forward(x)

    model, _ = at("O1", Featurizer())
    model(torch.randn(2, 4))
    assert model.seen == [FLOAT, HALF]


# -- a user's own region ----------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_users_region_decides_for_the_forward_inside(level):
    model, _ = at(level, cast_model_type=False if level == "O2" else None)
    with torch.autocast(here(), dtype=torch.bfloat16):
        assert product() == torch.bfloat16
        model(torch.randn(2, 4))
        with torch.autocast(here(), enabled=False):
            model(torch.randn(2, 4))
    assert model.seen == [torch.bfloat16, FLOAT]
    assert product() == (HALF if level == "O1" else FLOAT)


def test_a_region_is_over_at_its_last_exit():
    outer, again = torch.autocast(here(), dtype=torch.bfloat16), torch.autocast(here(), enabled=False)
    with outer as yielded:
        returns_itself = yielded is outer  # torch 2.4's does not
    model, _ = at("O1")
    at("O0")  # outside of a region the forward casts, and nothing else does
    with outer as region:
        assert (region is outer) is returns_itself
        with again:
            model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    for region in (again, outer):  # the same objects once more
        with region:
            model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert model.seen == [FLOAT, torch.bfloat16, HALF, FLOAT, HALF, torch.bfloat16, HALF]


def test_a_region_open_across_initialize():
    """It was entered before ``initialize`` and is left after it: casts outside models and in them stay right."""
    region = torch.autocast(here(), dtype=torch.bfloat16)
    region.__enter__()
    model, _ = at("O1")
    region.__exit__(None, None, None)
    assert product() == HALF
    _held = at("O0")
    model(torch.randn(2, 4))
    with region:
        model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    assert model.seen == [HALF, torch.bfloat16, HALF]


def test_a_region_inside_forward():
    class Inside(Probe):
        def forward(self, x):
            with torch.autocast(here(), dtype=torch.bfloat16):
                y = self.fc(x)
            return super().forward(y)

    model, _ = at("O1", Inside())
    assert model(torch.randn(2, 4)).dtype == HALF
    assert model.seen == [HALF]


def test_a_region_for_another_device_type_says_nothing():
    model, _ = at("O1")
    _held = at("O0")
    with torch.autocast("xpu", enabled=False):
        model(torch.randn(2, 4))
    assert model.seen == [HALF]


# -- checkpoint ----------------------------------------
@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*is deprecated:FutureWarning")  # torch 2.4's own use
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_with_the_casts_of_the_forward(reentrant):
    class Checkpointed(Probe):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model, optimizer = at("O1", Checkpointed())
    x = torch.randn(2, 4, requires_grad=True)
    with scale_loss(model(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    assert model.seen == [HALF, HALF]
    assert product() == HALF


def test_a_device_type_that_torch_cannot_autocast_is_named():
    model = nn.Linear(2, 2)
    model.register_buffer("elsewhere", torch.zeros(1, device="meta"))
    with pytest.warns(UserWarning, match="on the device type 'meta', which this torch cannot autocast"):
        _held = initialize(model, opt_level="O1", verbosity=0)


def test_casts_are_off_on_a_device_type_that_torch_cannot_autocast():
    _held = at("O1")
    with casts_off("vulkan"):  # what it was is an error to ask
        assert product() == FLOAT
    assert product() == HALF


def test_an_added_backend_can_autocast_if_its_module_says_so(monkeypatch):
    added = torch._C._get_privateuse1_backend_name()
    monkeypatch.setattr(torch, added, types.SimpleNamespace(), raising=False)
    assert added not in _torch.autocast_device_types()
    monkeypatch.setattr(torch, added, types.SimpleNamespace(get_amp_supported_dtype=list))
    assert added in _torch.autocast_device_types()


# -- models without tensors ----------------------------------------
def test_a_model_without_tensors_casts_where_the_others_are():
    class Nothing(nn.Module):
        def forward(self, x):
            return torch.mm(x, x)

    assert initialize(Nothing(), opt_level="O1", verbosity=0)(torch.ones(2, 2)).dtype == HALF
    model, _ = at("O1")
    assert initialize(Nothing(), opt_level="O1", verbosity=0)(torch.ones(2, 2)).dtype == HALF
    assert model(torch.ones(2, 4)).dtype == HALF


def test_a_model_without_tensors_alone_casts_on_every_device_that_it_may_be_given():
    """Eager and compiled code agree: the inputs say where it runs, and the first of them is not known to either."""
    norms = []

    class Nothing(nn.Module):
        def forward(self, x):
            norms.append(F.softmax(x, -1).dtype)  # float32 by the rules, also natively on CUDA
            return torch.mm(x, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "accelerator", lambda: "cuda")
        model = initialize(Nothing(), opt_level="O1", verbosity=0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_cuda = torch.zeros(2, 2, device="cuda:0")
        assert model(on_cuda).dtype == HALF
        assert torch.compile(model, backend="eager", fullgraph=True)(on_cuda).dtype == HALF
    assert model(torch.ones(2, 2)).dtype == HALF
    assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype == HALF
    assert set(norms) == {FLOAT}


# -- WGAN-GP ------------------------------------------------------------------------------------------------------
def test_gradient_penalty_trains_and_is_close_to_float32():
    def penalty(level):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        critic, optimizer = at(level, critic)
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(x).float().sum(), x, create_graph=True)
        loss = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        with scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return critic[0].weight.grad.clone()

    exact, cast = penalty("O0"), penalty("O1")
    # Half products with 11 bits and sums of 16 terms: some tenths of a percent of the largest gradient.
    assert (exact - cast).abs().max() < 5e-3 * exact.abs().max()
    assert cast.dtype == FLOAT
