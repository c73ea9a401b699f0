"""``amp.init`` and its handle: the API of before 2019 trains too."""

import copy

import pytest
import torch
import torch.nn.functional as F
from amp_training import make_step
from seeded import randn
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.torch


def data():
    torch.manual_seed(0)
    x = randn(16, 4)
    return x, (x.sum(1) > 0).long()  # which can be learned, whatever the weights of the device


def train(step, steps=20):
    x, y = data()
    losses = []
    for _ in range(steps):
        losses.append(step(x, y))
    assert losses[-1] < 0.7 * losses[0]
    return losses


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def test_handle_scale_loss_trains():
    handle = amp.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.item()

    train(step)
    assert handle.is_active()
    assert amp._DECORATOR_HANDLE is handle
    assert amp._amp_state.handle is handle


def test_wrapped_optimizer_trains_with_two_losses_and_skips():
    handle = amp.init(loss_scale="dynamic", verbose=False, enable_caching=True)
    model = net()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), num_loss=2)

    def step(x, y):
        optimizer.zero_grad()
        for half in (0, 1):
            loss = F.cross_entropy(model(x[half::2]), y[half::2])
            with optimizer.scale_loss(loss) as scaled:
                scaled.backward()
        optimizer.step()
        return loss.item()

    train(step)
    before = [p.clone() for p in model.parameters()]
    with optimizer.scale_loss(model(data()[0]).float().sum() * float("inf")) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**15, 2.0**16]


def test_a_wrapped_optimizer_with_too_many_losses():
    optimizer = amp.init().wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    with optimizer.scale_loss(torch.ones(1, requires_grad=True).sum()) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match=r"called 2 times before a step - wrap_optimizer\(num_loss=1\) .* - pass a"):
        optimizer.scale_loss(torch.ones(1))
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("call", [lambda: amp.init(False), lambda: amp.init(enabled=False)])
def test_disabled(call):
    handle = call()
    model = net()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(data()[0]).sum()
    for _ in range(2):  # more than num_loss says, which does not matter here
        with optimizer.scale_loss(loss) as scaled:
            assert scaled is loss
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert not handle.is_active()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_allow_banned():
    half, target = torch.full((2,), 0.5, dtype=torch.float16), torch.ones(2)
    amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(half, target)
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(half, target).dtype == torch.float32
    model = net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    assert F.binary_cross_entropy(half, target).dtype == torch.float32


@pytest.mark.usefixtures("tensors_on_the_accelerator")
def test_deactivate_is_final_for_this_handle_only():
    first, second = amp.init(), amp.init()
    first._deactivate()
    assert second.is_active()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    second._deactivate()
    assert not second.is_active()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    second._clear_cache()


def ambient_dtype():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def put_under_amp(level):
    model = net()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)


def by_init():
    handle = amp.init(patch_type=torch.float16)
    return handle._deactivate


def by_initialize():
    model, optimizer = put_under_amp("O1")

    def take_out():
        amp.initialize(model, optimizer, enabled=False)

    return take_out


def by_initialize_and_its_handle():
    held = put_under_amp("O1")

    def deactivate():
        amp._amp_state.handle._deactivate()
        assert held  # alive: its casts do not end with it

    return deactivate


@pytest.mark.usefixtures("tensors_on_the_accelerator")
@pytest.mark.parametrize("began", [by_init, by_initialize, by_initialize_and_its_handle])
def test_code_outside_of_models_has_the_casts_of_the_latest_session_that_remains(began):
    older = put_under_amp("O4")
    assert ambient_dtype() == torch.bfloat16
    end = began()
    assert ambient_dtype() == torch.float16
    end()
    assert ambient_dtype() == torch.bfloat16
    amp.initialize(*older, enabled=False)
    assert ambient_dtype() == torch.float32


def test_positional_enabled_and_a_static_scale():
    handle = amp.init(True, loss_scale="128.0")
    with handle.scale_loss(torch.ones(1), torch.optim.SGD(net().parameters(), lr=0.1)) as scaled:
        assert scaled.item() == 128.0


class Speech(nn.Module):
    """A half model that needs a float32 function inside, as espnet's with its CTC loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 2)
        self.seen = {}

    def loss_fn(self, logits, y):
        self.seen["registered"] = logits.dtype
        return F.cross_entropy(logits, y)

    def forward(self, x, y):
        hidden = self.a(x).relu()
        self.seen["list"] = F.softmax(hidden, 1).dtype
        self.seen["mm"] = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        return self.loss_fn(self.b(hidden), y)


LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def speech(level):
    torch.manual_seed(1)
    model = Speech()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.7), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    return model, optimizer, torch.bfloat16 if level in ("O4", "O5") else torch.float16


@pytest.mark.parametrize("level", LEVELS)
def test_init_after_initialize_casts_in_forwards_of_every_level(level):
    model, optimizer, half = speech(level)
    x, y = data()
    optimizer.zero_grad()
    model(x, y)
    model.seen.clear()
    amp.register_float_function(Speech, "loss_fn")
    handle = amp.init()

    def step(x, y):
        loss = model(x, y)
        make_step(optimizer, loss)
        optimizer.zero_grad()
        return loss.item()

    train(step)
    assert model.seen == {"registered": torch.float32, "list": torch.float32, "mm": half}
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == half
    handle._deactivate()
    model(x, y)
    alone = {"O1": half, "O4": half}.get(level, torch.float32)
    assert model.seen["mm"] == alone


@pytest.mark.parametrize("level", LEVELS)
def test_init_leaves_state_of_initialize_alone(level):
    """``amp.init()`` after ``initialize`` replaces neither its properties nor its scalers nor its handle."""
    model, optimizer, _ = speech(level)
    properties, scalers = amp._amp_state.opt_properties, amp._amp_state.loss_scalers
    before = amp._amp_state.handle
    scalers[0]._loss_scale = 2.0**9
    handle = amp.init()
    assert amp._amp_state.opt_properties is properties
    assert amp._amp_state.loss_scalers is scalers
    assert amp._amp_state.handle is before
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 0}}
    x, y = data()
    with amp.scale_loss(model(x, y), optimizer) as scaled:
        scaled.backward()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 1}}
    assert handle.is_active()


def test_a_second_init_is_a_new_beginning():
    amp.init(loss_scale=128.0)
    handle = amp.init(loss_scale=64.0)
    assert amp._amp_state.handle is handle
    assert amp._amp_state.loss_scalers[0].loss_scale() == 64.0


def test_a_copy_of_a_wrapped_optimizer():
    optimizer = amp.init().wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.125))
    for copied in (copy.copy(optimizer), copy.deepcopy(optimizer)):
        assert copied.param_groups[0]["lr"] == 0.125


# -- the flag that scripts set -----------------------------------------------------------------------------------------
def without_casts(call):
    """As ``disable_casts`` of apex, which scripts have copied."""
    amp._amp_state.handle._is_active = False
    try:
        return call()
    finally:
        amp._amp_state.handle._is_active = True


class Dtypes(nn.Module):
    """Returns the dtype that its function computes in."""

    def __init__(self, inside):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inside = inside

    def forward(self, x):
        if self.inside:
            return without_casts(lambda: self.dtype(x)), self.dtype(x)
        return self.dtype(x)

    def dtype(self, x):
        return str(torch.mm(x, self.layer.weight).dtype)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_script_turns_casts_off_for_a_while(level):
    half = {"O2": "torch.float16", "O3": "torch.float16", "O5": "torch.bfloat16"}
    cast = {"O1": "torch.float16", "O4": "torch.bfloat16"}
    off = half.get(level, "torch.float32")
    on = cast.get(level, off)
    x = torch.ones(2, 4)
    model = amp.initialize(Dtypes(inside=True), opt_level=level, verbosity=0)
    assert model(x) == (off, on)
    model.inside = False
    for _ in range(2):
        assert without_casts(lambda: model(x)) == off
        assert model(x) == on
        assert amp._amp_state.handle.is_active() == (level in cast)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_code_outside_of_models_follows_the_flag(level):
    x = torch.ones(2, 4)
    amp.initialize(net := nn.Linear(4, 4), opt_level=level, verbosity=0)  # casts end with the model
    handle = amp._amp_state.handle
    before = (x @ x.t()).dtype
    handle._is_active = False
    handle._is_active = False  # a flag: it does not nest
    assert not handle.is_active()
    assert not handle._is_active
    assert (x @ x.t()).dtype == torch.float32
    handle._is_active = True
    assert handle.is_active()
    assert (x @ x.t()).dtype == before != torch.float32
    handle._is_active = True
    assert handle.is_active()
    del net


def test_a_flag_that_stays_off_ends_with_a_reset():
    """The fixture that resets amp after each test finds torch as it was."""
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    amp._amp_state.handle._is_active = False
    assert model(torch.ones(1, 4)).dtype == torch.float32
