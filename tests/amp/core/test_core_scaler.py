"""The loss scaler against a plain Python reference."""

import dataclasses
import math
import random

import pytest
import torch
from amp_training import INF, Net, backward, masters, net, same, start, train
from counting import Counter
from internals import overflow_flags
from seeded import seeded
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import amp
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.scaling.loss_scale import FLOOR, MovingScale

pytestmark = pytest.mark.device

CPU = torch.device("cpu")


@dataclasses.dataclass
class Reference:
    """The transition of apex's scaler, in Python numbers."""

    scale: float
    window: int = 2000
    floor: float = FLOOR
    cap: float = 2.0**24
    unskipped: int = 0

    def update(self, overflow):
        if overflow:
            self.scale, self.unskipped = max(self.floor, self.scale / 2), 0
            return
        self.unskipped += 1
        if self.unskipped == self.window:
            self.scale, self.unskipped = min(self.cap, self.scale * 2), 0


def one_pass(scaler, overflow=False):
    loss = scaler.copy_on(CPU)
    scaler.unscale_grads([torch.full((3,), float("inf")) if overflow else torch.ones(3) * loss])
    return scaler.update_scale()


def state_of(scaler):
    return scaler.loss_scale(), scaler._unskipped


@pytest.mark.parametrize(
    ("scale", "unskipped", "overflow", "want"),
    [
        (2.0**16, 0, False, (2.0**16, 1)),
        (2.0**16, 1997, False, (2.0**16, 1998)),  # before the window
        (2.0**16, 1999, False, (2.0**17, 0)),  # at it
        (2.0**17, 0, False, (2.0**17, 1)),  # after it
        (2.0**16, 1999, True, (2.0**15, 0)),  # overflow where it would have grown
        (2.0**16, 0, True, (2.0**15, 0)),
        (2.0**24, 1999, False, (2.0**24, 0)),  # at the cap
        (2.0**23 * 1.5, 1999, False, (2.0**24, 0)),  # to the cap
        (2.0**30, 5, False, (2.0**30, 6)),  # written above the cap: stays...
        (2.0**30, 1999, False, (2.0**24, 0)),  # ...until the next growth
        (2.0**30, 5, True, (2.0**29, 0)),
        (FLOOR, 7, True, (FLOOR, 0)),
        (FLOOR * 1.5, 7, True, (FLOOR, 0)),
    ],
)
def test_transition_table(scale, unskipped, overflow, want):
    scaler = LossScaler("dynamic")
    one_pass(scaler)
    scaler._loss_scale, scaler._unskipped = scale, unskipped
    assert one_pass(scaler, overflow) is overflow
    assert state_of(scaler) == want
    assert scaler._has_overflow is overflow


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("unskipped", [0, 2])
@pytest.mark.parametrize("scale", [2.0, 3.0, 8.0, 48.0, 64.0, 128.0])
def test_one_transition(scale, unskipped, overflow):
    """For a scale that the host knows to be within the limits, a move takes few kernels."""
    reference = Reference(scale, 3, 2.0, 64.0, unskipped)
    reference.update(overflow)
    want = reference.scale, reference.unskipped
    found_inf = torch.tensor(float(overflow))
    for is_within_limits in {False, scale <= 64.0}:
        moving = MovingScale(growth_factor=2.0)
        moving.is_dynamic = True
        moving.growth_interval, moving.smallest, moving.largest = 3, 2.0, 64.0
        moving.written_scale = scale if is_within_limits else 1.0
        moving.scale, moving.clean_passes = torch.tensor(scale), torch.tensor(unskipped, dtype=torch.int32)
        with Counter() as counter:
            moving.adjust(found_inf)
        assert (moving.scale.item(), moving.clean_passes.item(), found_inf.item()) == (*want, float(overflow))
        assert counter.syncs == 0
        assert not is_within_limits or counter.ops == 2


@pytest.mark.parametrize(("cap", "first"), [(512.0, 512.0), (2.0**16, 2.0**16), (2.0**24, 2.0**16)])
def test_the_cap_holds_for_the_first_scale_too(cap, first):
    scaler = LossScaler("dynamic", max_loss_scale=cap, scale_window=1)
    assert scaler.loss_scale() == first
    for _ in range(20):
        one_pass(scaler)
    assert scaler.loss_scale() == cap


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize(("name", "limit"), [("_min_loss_scale", 4096.0), ("_max_loss_scale", 256.0)])
def test_a_limit_written_past_the_scale_moves_it_with_its_next_move(name, limit, is_written):
    """As in apex: a scale comes to its limits when it moves, whoever has brought it where it is."""
    scaler = LossScaler("dynamic", init_scale=1024.0 if is_written else 2.0**16, scale_window=2)
    for _ in range(0 if is_written else 6):
        one_pass(scaler, overflow=True)
    setattr(scaler, name, limit)
    assert state_of(scaler) == (1024.0, 0)
    one_pass(scaler)
    assert state_of(scaler) == (1024.0, 1)
    one_pass(scaler, overflow=name == "_min_loss_scale")
    assert state_of(scaler) == (limit, 0)


@pytest.mark.parametrize("seed", range(5))
def test_any_history_as_the_reference(seed):
    dice = random.Random(seed)
    window, floor, cap = dice.choice([1, 3, 7]), dice.choice([1.0, 64.0]), dice.choice([2.0**17, 2.0**20])
    scaler = LossScaler("dynamic", scale_window=window, min_loss_scale=floor, max_loss_scale=cap)
    reference = Reference(2.0**16, window, floor, cap)
    for step in range(200):
        if dice.random() < 0.02:
            scaler._loss_scale = reference.scale = 2.0 ** dice.randint(0, 26)
        overflow = dice.random() < (0.1 if step < 100 else 0.4)
        one_pass(scaler, overflow)
        reference.update(overflow)
        assert state_of(scaler) == (reference.scale, reference.unskipped), step


def test_a_static_scale_counts_and_neither_moves_nor_skips():
    scaler = LossScaler(128.0, scale_window=2)
    for overflow in (False, True, False, False):
        assert one_pass(scaler, overflow) is False
    assert state_of(scaler) == (128.0, 4)
    assert not scaler.dynamic


def test_constructed_directly_as_legacy_code_does():
    scaler = amp.scaler.LossScaler(2**14)
    assert (scaler.loss_scale(), scaler._loss_scale, scaler.dynamic) == (16384.0, 16384.0, False)
    scaler = LossScaler("dynamic", init_scale=2.0**10, scale_factor=4.0, scale_window=2)
    assert (scaler._scale_seq_len, scaler._unskipped, scaler._has_overflow) == (2, 0, False)
    assert scaler._overflow_buf.tolist() == [0]
    one_pass(scaler)
    scaler._scale_seq_len = 3
    one_pass(scaler)
    assert scaler.loss_scale() == 2.0**10
    one_pass(scaler)
    assert scaler.loss_scale() == 2.0**12
    one_pass(scaler, overflow=True)
    assert scaler._overflow_buf.tolist() == [1]
    assert scaler.loss_scale() == 2.0**10
    scaler.clear_overflow_state()
    assert scaler._has_overflow is False


def test_a_pass_without_gradients_is_a_clean_one():
    scaler = LossScaler("dynamic")
    scaler.copy_on(CPU)
    scaler.unscale_grads([])
    assert scaler.update_scale() is False
    assert state_of(scaler) == (2.0**16, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_gradients_of_any_dtype_are_unscaled_and_checked(dtype):
    scaler = LossScaler("dynamic", init_scale=4.0)
    scaler.copy_on(CPU)
    grad = torch.full((3,), 8.0, dtype=dtype)
    scaler.unscale_grads([grad])
    assert torch.equal(grad, torch.full((3,), 2.0, dtype=dtype))
    assert scaler.update_scale() is False
    scaler.unscale_grads([torch.full((1,), float("nan"), dtype=dtype), grad])
    assert scaler.update_scale() is True


def test_complex_gradients_that_are_conjugated_in_the_reading_are_unscaled():
    scaler = LossScaler("dynamic", init_scale=4.0)
    scaler.copy_on(CPU)
    memory = torch.full((3,), 8.0 + 4.0j)
    scaler.unscale_grads([memory.conj()])
    assert memory.tolist() == [2.0 + 1.0j] * 3


def test_a_scaler_that_refuses_a_state_keeps_its_own():
    scaler = LossScaler("dynamic")
    before = scaler.state_dict()
    with pytest.raises(KeyError):
        scaler.load_state_dict({"scale": 4.0, "growth_factor": 3.0})
    assert scaler.state_dict() == before


class KernelsOfCuda(TorchDispatchMode):
    """Refuses on any device what CUDA refuses: its kernel that unscales takes no bfloat16."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            assert all(grad.dtype != torch.bfloat16 for grad in args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [3.0, 2.0**16])
def test_bfloat16_gradients_are_unscaled_by_kernels_that_cuda_has(scale):
    grads = [torch.randn(size, generator=seeded(size)).bfloat16() for size in range(1, 40)]
    grads.append(torch.randn(6, 8, generator=seeded(0)).bfloat16().t())  # strides of a transposed weight
    want = [(grad.float() * (1 / torch.tensor(scale))).bfloat16() for grad in grads]
    scaler = LossScaler("dynamic", init_scale=scale)
    with KernelsOfCuda(), Counter() as counter:
        scaler.unscale_grads(grads)
    assert same(grads, want)
    assert grads[-1].stride() == want[-1].stride()
    assert counter.syncs == 0
    assert counter.ops < 2 * len(grads)  # an empty copy for each, and few passes over them all
    assert scaler.update_scale() is False


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 20, 39])
def test_an_overflow_in_any_bfloat16_gradient_is_found(place, number):
    grads = [torch.ones(size + 1, dtype=torch.bfloat16) for size in range(40)]
    grads[place][-1] = number
    scaler = LossScaler("dynamic")
    with KernelsOfCuda():
        scaler.unscale_grads(grads)
    assert scaler.update_scale() is True


IN_BFLOAT16 = {"cast_model_type": torch.bfloat16}


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**14])
@pytest.mark.parametrize(
    ("level", "options"),
    [("O3", IN_BFLOAT16), ("O5", {"master_weights": False}), ("O1", {})],
    ids=["O3 in bfloat16", "O5 without masters", "a bfloat16 parameter at O1"],
)
def test_training_in_bfloat16_with_a_loss_scale(level, options, loss_scale, monkeypatch):
    """Scales are powers of two that no gradient of a half is too small for: no bit of a weight depends on them."""
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    weights = []
    for scale in (loss_scale, 2.0**15):
        model = net()
        if level == "O1":
            model.b.bfloat16()
        model, optimizer = start(level, model=model, loss_scale=scale, **options)
        with KernelsOfCuda():
            train(model, optimizer)
        weights.append(masters(optimizer))
    assert same(*weights)
    assert any(weight.dtype == torch.bfloat16 for weight in weights[0])


def test_mixed_dtypes_in_one_pass():
    scaler = LossScaler("dynamic", init_scale=2.0)
    scaler.copy_on(CPU)
    grads = [torch.ones(2, dtype=d) * 2 for d in (torch.float32, torch.float16, torch.float32)]
    scaler.unscale_grads(grads)
    assert all(g.float().tolist() == [1.0, 1.0] for g in grads)
    assert scaler.update_scale() is False


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2), (0,)])
def test_losses_of_any_shape_and_dtype_come_out_float32(shape):
    _, optimizer = start("O1")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with amp.scale_loss(torch.ones(shape, dtype=dtype), optimizer, delay_unscale=True) as scaled:
            assert scaled.dtype == torch.float32
            assert torch.equal(scaled, torch.full(shape, 2.0**16))


def test_users_write_and_read_the_scale_of_a_running_scaler():
    model, optimizer = start("O2")
    train(model, optimizer, 1)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2**20
    assert (scaler.loss_scale(), scaler._loss_scale) == (2.0**20, 2.0**20)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 1}}
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert float(scaled) == 2.0**20


def test_a_scaler_put_in_place_of_another_is_used():
    _, optimizer = start("O2")
    amp._amp_state.loss_scalers[0] = LossScaler(2**14)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert float(scaled) == 2.0**14
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**14


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scalers_of_several_losses_put_into_the_list_are_used(level, capsys):
    model, optimizer = start(level, num_losses=2)
    amp._amp_state.loss_scalers[:] = [LossScaler(2**14), LossScaler("dynamic", init_scale=2.0**10)]
    for loss_id, scale in ((0, 2.0**14), (1, 2.0**10)):
        with amp.scale_loss(torch.ones(()), optimizer, loss_id=loss_id) as scaled:
            assert float(scaled) == scale
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [2.0**14, 2.0**10]
    backward(model, optimizer, 1, times=INF, loss_id=1)
    optimizer.step()
    assert "loss scaler 1 reducing loss scale to 512.0" in capsys.readouterr().out


def test_a_scaler_put_in_place_of_a_scale_of_one_scales():
    model, optimizer = start("O0")
    amp._amp_state.loss_scalers[0] = LossScaler(2.0**4)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert float(scaled) == 2.0**4


def test_a_call_before_the_latest_keeps_its_scalers():
    _, first = start("O2", loss_scale=4.0)
    start("O2", model=Net())
    amp._amp_state.loss_scalers[0] = LossScaler(2.0**14)
    with amp.scale_loss(torch.ones(()), first) as scaled:
        assert float(scaled) == 4.0


@pytest.mark.parametrize("value", [None, [], [LossScaler(2.0)]])
def test_the_list_of_scalers_cannot_be_replaced(value):
    start("O2")
    before = amp._amp_state.loss_scalers
    with pytest.raises(
        AttributeError, match="loss_scalers = .* - the list belongs to the call .* - put scalers into it"
    ):
        amp._amp_state.loss_scalers = value
    assert amp._amp_state.loss_scalers is before


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 1e-46, "0"])
def test_a_written_scale_that_cannot_be_one_is_refused(value, is_used):
    scaler = LossScaler("dynamic")
    if is_used:
        one_pass(scaler)
    before = state_of(scaler)
    with pytest.raises(ValueError, match="_loss_scale = .* - a scale is a positive finite number .* - write a power"):
        scaler._loss_scale = value
    assert state_of(scaler) == before


def test_scalers_written_before_initialize_do_no_harm():
    amp._amp_state.loss_scalers = []  # as scripts that mock apex's state do
    model, optimizer = start("O2")
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**16]


def test_an_overflow_that_is_put_off_for_ever_is_counted_at_last():
    model, optimizer = start("O1")
    for seed in range(30):
        backward(model, optimizer, seed, times=INF if seed == 0 else 1.0, delay_overflow_check=True)
        optimizer.step()
        optimizer.zero_grad()
    (scaler,) = amp._amp_state.loss_scalers
    assert scaler.loss_scale() == 2.0**16
    backward(model, optimizer)
    assert scaler.loss_scale() == 2.0**15


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_early_overflow_put_off_by_many_blocks_skips(level):
    """One flag tells of all of them."""
    model, optimizer = start(level)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for seed in range(40):
        backward(model, optimizer, seed % 3, times=INF if seed == 0 else 1.0, delay_overflow_check=True)
    assert overflow_flags(optimizer) == 1
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))


# -- apex's own methods, called by hand ----------------------------------------------------------------------------


def grads(*values, dtype=torch.float16):
    return [torch.full((3,), value, dtype=dtype) for value in values]


def test_unscale_by_hand_writes_masters_and_update_counts():
    scaler = LossScaler("dynamic", init_scale=8.0)
    model, masters = grads(16.0, 4.0), grads(0.0, 0.0, dtype=torch.float32)
    scaler.unscale(model, masters, scaler.loss_scale(), models_are_masters=False)
    assert [m.tolist() for m in masters] == [[2.0] * 3, [0.5] * 3]
    assert [m.tolist() for m in model] == [[16.0] * 3, [4.0] * 3]
    assert scaler.update_scale() is False
    assert state_of(scaler) == (8.0, 1)
    scaler.unscale(grads(INF, 4.0), masters, scaler.loss_scale())
    assert scaler.update_scale() is True
    assert state_of(scaler) == (4.0, 0)


def test_unscale_by_hand_in_place_by_another_scale():
    scaler = LossScaler(8.0)
    model = grads(16.0, dtype=torch.float32)
    scaler.unscale(model, model, None, models_are_masters=True)
    assert model[0].tolist() == [2.0] * 3
    scaler.unscale(model, model, None, models_are_masters=True, scale_override=0.5)
    assert model[0].tolist() == [4.0] * 3


def test_unscale_by_hand_waits_for_clear_after_an_overflow():
    scaler = LossScaler("dynamic", init_scale=8.0)
    masters = grads(1.0, dtype=torch.float32)
    scaler.unscale(grads(INF), masters)
    scaler.update_scale()
    masters = grads(1.0, dtype=torch.float32)
    scaler.unscale(grads(16.0), masters)
    assert masters[0].tolist() == [1.0] * 3
    scaler.clear_overflow_state()
    scaler.unscale(grads(16.0), masters)
    assert masters[0].tolist() == [4.0] * 3  # the scale is 4 since


@pytest.mark.parametrize(("override", "want"), [(None, 5.0), ((4.0, 2.0, 0.5), 2.75)])
def test_unscale_with_stashed_adds_and_leaves_the_rest(override, want):
    scaler = LossScaler("dynamic", init_scale=8.0)
    model, stashed, masters = grads(16.0), grads(3.0, dtype=torch.float32), grads(0.0, dtype=torch.float32)
    scaler.unscale_with_stashed(model, stashed, masters, scale_override=override)
    assert masters[0].tolist() == [want] * 3
    assert (model[0].tolist(), stashed[0].tolist()) == ([16.0] * 3, [3.0] * 3)
    own = grads(16.0, dtype=torch.float32)
    scaler.unscale_with_stashed(own, stashed, own, scale_override=override)
    assert own[0].tolist() == [want] * 3
    assert scaler.update_scale() is False


def test_unscale_with_stashed_checks_the_new_gradients_alone():
    scaler = LossScaler("dynamic")
    scaler.unscale_with_stashed(grads(1.0), grads(INF, dtype=torch.float32), grads(0.0, dtype=torch.float32))
    assert scaler.update_scale() is False
    scaler.unscale_with_stashed(grads(INF), grads(1.0, dtype=torch.float32), grads(0.0, dtype=torch.float32))
    assert scaler.update_scale() is True


@pytest.mark.parametrize("call", ["unscale", "unscale_with_stashed"])
def test_lists_of_different_lengths_are_refused(call):
    scaler = LossScaler("dynamic")
    with pytest.raises(ValueError, match=f"LossScaler.{call} got lists of .* tensors - .* - pass"):
        getattr(scaler, call)(*[grads(1.0), grads(1.0, 1.0), grads(1.0)][: 2 if call == "unscale" else 3])


def test_flags_of_apex_s_scaler_exist_and_can_be_set(monkeypatch):
    assert LossScaler.has_fused_kernel is True
    assert LossScaler.warned_no_fused_kernel is LossScaler.warned_unscaling_non_fp32_grad is False
    monkeypatch.setattr(LossScaler, "warned_unscaling_non_fp32_grad", True)
    assert LossScaler(2.0).warned_unscaling_non_fp32_grad is True


@pytest.mark.parametrize("value", [True, False])
def test_an_overflow_can_be_read_and_is_not_written(value):
    scaler = LossScaler("dynamic")
    with pytest.raises(AttributeError, match="_has_overflow = .* - .* - .* scaler._overflow_buf = .*update_scale"):
        scaler._has_overflow = value
    assert scaler._has_overflow is False
    scaler._overflow_buf = torch.tensor([1])  # what the message names
    assert scaler.update_scale() is True
    assert scaler._has_overflow is True
    assert state_of(scaler) == (2.0**15, 0)


# -- subclasses --------------------------------------------------------------------------------------------------------
class AllReducing(LossScaler):
    """As scripts for model parallelism have it: apex called the methods that it overrides."""


@pytest.mark.parametrize("scaler", [AllReducing("dynamic"), torch.amp.GradScaler("cpu"), 2.0**14])
def test_another_kind_of_scaler_is_refused(scaler):
    model, optimizer = start("O2")
    rule = rf"loss_scalers\[0\] is a {type(scaler).__name__} - .* itself - .*delay_overflow_check=True.*update_scale"
    amp._amp_state.loss_scalers[0] = scaler
    with pytest.raises(TypeError, match=rule):
        backward(model, optimizer)


# -- no scalers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_num_losses_0_initializes_and_scales_no_loss(level):
    model, optimizer = start(level, num_losses=0)
    assert amp._amp_state.loss_scalers == []
    assert amp.state_dict() == {}
    for optimizers in (optimizer, []):
        with pytest.raises(IndexError, match=r"loss_id=0 - amp.initialize\(num_losses=0\) made no scalers - pass"):
            amp.scale_loss(torch.ones(()), optimizers)
    with torch.no_grad():
        model(torch.ones(4, 6))


# -- whose step an overflow skips --------------------------------------------------------------------------------------
CLEAN, OVERFLOWS = 1.0, float("inf")
DECIDED = {
    "by the script": (["delayed", OVERFLOWS, "update"], False),
    "by the script, after a block": (["block", CLEAN, "delayed", OVERFLOWS, "update"], False),
    "by the script, twice": (["delayed", CLEAN, "update", "delayed", OVERFLOWS, "update"], False),
    "by an earlier block": (["block", OVERFLOWS, "delayed", CLEAN, "update"], True),
    "by a later block": (["delayed", OVERFLOWS, "block", CLEAN], True),
    "by a later block, before others": (["delayed", OVERFLOWS, "block", CLEAN, "delayed", CLEAN, "update"], True),
    "by nobody yet": (["delayed", OVERFLOWS, "update", "delayed", OVERFLOWS], True),
}


@pytest.mark.parametrize(("events", "is_skipped"), DECIDED.values(), ids=DECIDED)
def test_who_decides_about_the_step_of_a_delayed_overflow(events, is_skipped):
    """The script does, by ``update_scale()``, about the passes since the last transition that left the scale alone."""
    model, optimizer = start("O1")
    (scaler,) = amp._amp_state.loss_scalers
    rest = iter(events)
    for event in rest:
        if event == "update":
            scaler.update_scale()
        else:
            backward(model, optimizer, times=next(rest), delay_overflow_check=event == "delayed")
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is is_skipped
