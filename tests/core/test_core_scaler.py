"""The loss scaler against a plain Python reference."""

import dataclasses
import random

import pytest
import torch
from core_kit import Net, backward, start, train

from ampcompat import amp
from ampcompat.amp.scaler import FLOOR, LossScaler


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
    loss = scaler.scale_loss(torch.ones(()))
    scaler.unscale_([torch.full((3,), float("inf")) if overflow else torch.ones(3) * loss])
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


@pytest.mark.parametrize(("minimum", "want"), [(None, FLOOR), (1.0, 1.0), (128.0, 128.0), (3.0, 3.0)])
def test_the_floor_is_reached_and_kept(minimum, want):
    scaler = LossScaler("dynamic", min_loss_scale=minimum)
    for _ in range(50):
        one_pass(scaler, overflow=True)
    assert state_of(scaler) == (want, 0)


@pytest.mark.parametrize(("cap", "first"), [(512.0, 512.0), (2.0**16, 2.0**16), (2.0**24, 2.0**16)])
def test_the_cap_holds_for_the_first_scale_too(cap, first):
    scaler = LossScaler("dynamic", max_loss_scale=cap, scale_window=1)
    assert scaler.loss_scale() == first
    for _ in range(20):
        one_pass(scaler)
    assert scaler.loss_scale() == cap


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
    scaler.scale_loss(torch.ones(()))
    scaler.unscale_([])
    assert scaler.update_scale() is False
    assert state_of(scaler) == (2.0**16, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_gradients_of_any_dtype_are_unscaled_and_checked(dtype):
    scaler = LossScaler("dynamic", init_scale=4.0)
    scaler.scale_loss(torch.ones(()))
    grad = torch.full((3,), 8.0, dtype=dtype)
    scaler.unscale_([grad])
    assert torch.equal(grad, torch.full((3,), 2.0, dtype=dtype))
    assert scaler.update_scale() is False
    scaler.unscale_([torch.full((1,), float("nan"), dtype=dtype), grad])
    assert scaler.update_scale() is True


def test_mixed_dtypes_in_one_pass():
    scaler = LossScaler("dynamic", init_scale=2.0)
    scaler.scale_loss(torch.ones(()))
    grads = [torch.ones(2, dtype=d) * 2 for d in (torch.float32, torch.float16, torch.float32)]
    scaler.unscale_(grads)
    assert all(g.float().tolist() == [1.0, 1.0] for g in grads)
    assert scaler.update_scale() is False


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2), (0,)])
def test_losses_of_any_shape_and_dtype_come_out_float32(shape):
    scaler = LossScaler("dynamic")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        scaled = scaler.scale_loss(torch.ones(shape, dtype=dtype))
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
def test_a_list_of_scalers_put_in_place_of_the_list_is_used(level, capsys):
    model, optimizer = start(level, num_losses=2)
    mine = [LossScaler(2**14), LossScaler("dynamic", init_scale=2.0**10)]
    amp._amp_state.loss_scalers = mine
    assert amp._amp_state.loss_scalers is mine
    for loss_id, scale in ((0, 2.0**14), (1, 2.0**10)):
        with amp.scale_loss(torch.ones(()), optimizer, loss_id=loss_id) as scaled:
            assert float(scaled) == scale
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [2.0**14, 2.0**10]
    backward(model, optimizer, 1, times=float("inf"), loss_id=1)
    optimizer.step()
    assert "loss scaler 1 reducing loss scale to 512.0" in capsys.readouterr().out


def test_a_scaler_put_in_place_of_a_scale_of_one_scales():
    model, optimizer = start("O0")
    amp._amp_state.loss_scalers[0] = LossScaler(2.0**4)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert float(scaled) == 2.0**4
    amp._amp_state.loss_scalers = [LossScaler(2.0**5)]
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert float(scaled) == 2.0**5


def test_a_call_before_the_latest_keeps_its_scalers():
    _, first = start("O2", loss_scale=4.0)
    start("O2", model=Net())
    amp._amp_state.loss_scalers = [LossScaler(2.0**14)]
    with amp.scale_loss(torch.ones(()), first) as scaled:
        assert float(scaled) == 4.0


@pytest.mark.parametrize("wrong", [None, 128.0, LossScaler(2.0), [], [2.0**14], [torch.amp.GradScaler("cpu")]])
def test_what_is_no_list_of_scalers_is_refused(wrong):
    start("O2")
    before = amp._amp_state.loss_scalers
    with pytest.raises(TypeError, match="loss_scalers = .* - .* list of amp.scaler.LossScaler - "):
        amp._amp_state.loss_scalers = wrong
    assert amp._amp_state.loss_scalers is before


def test_an_entry_that_is_no_scaler_is_refused_by_the_block():
    model, optimizer = start("O2")
    amp._amp_state.loss_scalers[0] = 2.0**14
    with pytest.raises(TypeError, match=r"loss_scalers\[0\] is float - .* - put a amp.scaler.LossScaler there"):
        backward(model, optimizer)
    amp._amp_state.loss_scalers[0] = LossScaler(2.0**14)
    backward(model, optimizer)
    optimizer.step()


def test_scalers_written_before_initialize_do_no_harm():
    amp._amp_state.loss_scalers = []  # as scripts that mock apex's state do
    model, optimizer = start("O2")
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**16]


def test_an_overflow_that_is_put_off_for_ever_is_counted_at_last(monkeypatch):
    monkeypatch.setattr("ampcompat.amp.scaler.MANY", 8)
    model, optimizer = start("O1")
    for seed in range(30):
        backward(model, optimizer, seed, times=float("inf") if seed == 0 else 1.0, delay_overflow_check=True)
        optimizer.step()
        optimizer.zero_grad()
    (scaler,) = amp._amp_state.loss_scalers
    assert scaler.loss_scale() == 2.0**16
    assert len(scaler._put_off) <= 8
    backward(model, optimizer)
    assert scaler.loss_scale() == 2.0**15


def test_overflows_put_off_by_blocks_without_a_step_stay_few(monkeypatch):
    monkeypatch.setattr("ampcompat.amp.scaler.MANY", 8)
    monkeypatch.setattr("ampcompat.amp.stash.MANY", 3)
    model, optimizer = start("O1")
    (scaler,) = amp._amp_state.loss_scalers
    for seed in range(40):
        backward(model, optimizer, seed % 3, delay_overflow_check=True)
        assert len(scaler._put_off) <= 9
        assert len(optimizer._amp_stash.overflows) <= 4


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_early_overflow_that_many_blocks_put_off_skips_the_step(level, monkeypatch):
    monkeypatch.setattr("ampcompat.amp.scaler.MANY", 16)
    monkeypatch.setattr("ampcompat.amp.stash.MANY", 16)
    model, optimizer = start(level)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for seed in range(40):
        backward(model, optimizer, seed % 3, times=float("inf") if seed == 0 else 1.0, delay_overflow_check=True)
    assert len(optimizer._amp_stash.overflows) <= 16
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
