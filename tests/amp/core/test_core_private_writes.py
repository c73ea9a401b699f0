"""Names private by underscore that scripts write: what each write does, and that it stays what it was under apex."""

import numpy as np
import pytest
import torch
from amp_training import INF, backward, loss_of, masters, same, start, train

from ampcompat import amp

# -- _amp_state.loss_scalers[i], _amp_state.verbosity, amp.load_state_dict ---------------------------------------------
#: Spellings of 4 that apex's arithmetic took, and its text.
FOURS = [4, 4.0, np.int64(4), np.float32(4), torch.tensor(4), torch.tensor(4.0), torch.tensor(4, dtype=torch.half), "4"]
#: What is no number.
NO_NUMBERS = [None, "many", [4], {}, object(), float("nan"), 4 + 1j, torch.ones(2)]


def writer_of(name):
    """What writes ``name`` of the first scaler."""
    return lambda value: setattr(amp._amp_state.loss_scalers[0], name, value)


def load(name):
    """What loads a state dict whose entry ``name`` is the value that is written."""
    return lambda value: amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1, name: value}})


def write_verbosity(value):
    amp._amp_state.verbosity = value


#: What scripts write: how, how it reads after a 4 was written, and what else is refused.
WRITES = {
    "_scale_seq_len": (writer_of("_scale_seq_len"), lambda: amp._amp_state.loss_scalers[0]._scale_seq_len, [2.5]),
    "_min_loss_scale": (
        writer_of("_min_loss_scale"),
        lambda: amp._amp_state.loss_scalers[0]._min_loss_scale,
        [float("inf")],
    ),
    "_max_loss_scale": (writer_of("_max_loss_scale"), lambda: amp._amp_state.loss_scalers[0]._max_loss_scale, [0, -1]),
    "_loss_scale": (writer_of("_loss_scale"), lambda: amp._amp_state.loss_scalers[0].loss_scale(), [0, float("inf")]),
    "_unskipped": (writer_of("_unskipped"), lambda: amp._amp_state.loss_scalers[0]._unskipped, [2.5]),
    "_amp_state.verbosity": (write_verbosity, lambda: amp._amp_state.verbosity, []),
    "load loss_scale": (load("loss_scale"), lambda: amp.state_dict()["loss_scaler0"]["loss_scale"], [0]),
    "load unskipped": (load("unskipped"), lambda: amp.state_dict()["loss_scaler0"]["unskipped"], [2.5, -1]),
}
MAY_BE_NONE = ["_min_loss_scale"]


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_numbers_of_every_kind_are_taken(name, is_used):
    """The next blocks train; the name reads as the number that was written."""
    write, read, _ = WRITES[name]
    for value in FOURS:
        model, optimizer = start("O2")
        if is_used:
            train(model, optimizer, 1)
        write(value)
        assert read() == 4
        train(model, optimizer, 2)
        assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("name", WRITES)
def test_what_is_no_number_is_refused_when_it_is_written(name):
    """The message says what was written, what it must be, and what to write; nothing has changed."""
    write, read, others = WRITES[name]
    model, optimizer = start("O2")
    before = read()
    for value in [*NO_NUMBERS, *others]:
        if value is None and name in MAY_BE_NONE:
            continue
        with pytest.raises(ValueError, match=r"(?s).* - .* - "):
            write(value)
        assert read() == before
    train(model, optimizer, 1)


@pytest.mark.parametrize("interval", [2.0, np.float32(2), "2"])
def test_a_growth_interval_of_argparse_is_followed(interval):
    """NVIDIA's GNMT writes what argparse made with ``type=float``."""
    model, optimizer = start("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**8
    amp._amp_state.loss_scalers[0]._scale_seq_len = interval
    before = masters(optimizer)
    train(model, optimizer, 4)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 0}}
    assert not same(masters(optimizer), before)


@pytest.mark.parametrize("never", [0, -3, 1e12])
def test_a_growth_interval_that_is_never_reached(never):
    """apex compared the count with it."""
    model, optimizer = start("O2")
    amp._amp_state.loss_scalers[0]._scale_seq_len = never
    train(model, optimizer, 3)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 3}}


@pytest.mark.parametrize("none", [None, 0, 0.0, False])
def test_no_smallest_scale(none):
    """apex had none for 0, too; 2^-24 remains, since a scale of zero cannot recover."""
    model, optimizer = start("O2", min_loss_scale=2.0**15)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._min_loss_scale = none
    assert scaler._min_loss_scale == 2.0**-24


def test_a_largest_scale_past_float32():
    """The scale stops before it would be inf, which no back-off can end."""
    model, optimizer = start("O1")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._max_loss_scale = float("inf")
    scaler._scale_seq_len = 1
    scaler._loss_scale = 2.0**127
    with amp.scale_loss(torch.zeros((), requires_grad=True), optimizer) as scaled:
        scaled.backward()
    assert scaler.loss_scale() == 2.0**127


@pytest.mark.parametrize("false", [False, 0, np.bool_(False), torch.tensor(False)])
def test_dynamic_written(false):
    """A scale that a script makes static stays, and skips no step; made dynamic again, it moves."""
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    train(model, optimizer, 1)
    scaler.dynamic = false
    assert scaler.dynamic is False
    train(model, optimizer, 1, times=INF)
    assert not amp.step_was_skipped(optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 2}}
    scaler.dynamic = true = torch.tensor(not false)
    assert scaler.dynamic is bool(true)
    backward(model, optimizer, times=INF)
    assert scaler.loss_scale() == 2.0**15


def test_a_static_scale_made_dynamic():
    model, optimizer = start("O1", loss_scale=128.0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler.dynamic = True
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert scaler.loss_scale() == 64.0


@pytest.mark.parametrize("loss_id", [1, True, np.int64(1), torch.tensor(1), -1])
def test_loss_ids_of_every_kind(loss_id):
    """apex indexed its list of scalers."""
    model, optimizer = start("O2", num_losses=2)
    backward(model, optimizer, loss_id=loss_id)
    assert [scaler._unskipped for scaler in amp._amp_state.loss_scalers] == [0, 1]
    assert [scaler.loss_id for scaler in amp._amp_state.loss_scalers] == [0, 1]


@pytest.mark.parametrize("loss_id", [2, -3, 1.0, "1", None])
def test_what_is_no_index_is_refused(loss_id):
    model, optimizer = start("O2", num_losses=2)
    with pytest.raises(IndexError, match="loss_id=.* - .* - pass one of these"):
        amp.scale_loss(loss_of(model), optimizer, loss_id=loss_id)


# -- optimizer._amp_stash ----------------------------------------------------------------------------------------------
def started_with_gradients(level):
    """A model and its optimizer, and the gradients that amp makes of batch 1."""
    model, optimizer = start(level, loss_scale=128.0)
    backward(model, optimizer, 1)
    by_amp = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    return model, optimizer, by_amp


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_cleared_gradients_of_a_delayed_block_do_not_come_back(level):
    """A script writes ``params_have_scaled_gradients = False`` when it has cleared them; the overflow still counts."""
    model, optimizer = start(level)
    backward(model, optimizer, 1, times=INF, delay_unscale=True)
    for param in model.parameters():
        param.grad = None
    optimizer._amp_stash.params_have_scaled_gradients = False
    backward(model, optimizer, 2)
    got = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    assert same(got, [p.grad for p in amp.master_params(optimizer)])
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_already_patched_can_be_written_and_changes_no_step(level, written):
    model, optimizer = start(level)
    stash = optimizer._amp_stash
    stash.already_patched = written
    train(model, optimizer, 1)
    assert amp.step_was_skipped(optimizer) is False
    backward(model, optimizer, times=INF)
    stash.already_patched = written
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is True


def test_gradients_cannot_be_declared_scaled():
    """By what, only a block knows."""
    _, optimizer = start("O1")
    with pytest.raises(RuntimeError, match=r"params_have_scaled_gradients = True - .* - write `with amp.scale_loss"):
        optimizer._amp_stash.params_have_scaled_gradients = True


NOT_KEPT = {
    "amp keeps no lists by group": ["fp16_groups", "fp32_from_fp16_groups", "fp32_from_fp32_groups"],
    "read p.grad before the block": ["all_fp16_grad_stash", "all_fp32_grad_stash", "all_fp32_from_fp32_grad_stash"],
}


@pytest.mark.parametrize(("message", "names"), NOT_KEPT.items())
def test_lists_that_are_not_kept_are_refused_with_what_to_read(message, names):
    """``hasattr`` says no."""
    for level in ("O1", "O2", "O3"):
        _, optimizer = start(level)
        for name in names:
            with pytest.raises(AttributeError, match=f"no .*{name}.* - .*{message}"):
                getattr(optimizer._amp_stash, name)


def test_a_scripts_own_post_backward_is_refused_what_it_calls():
    from ampcompat.amp._process_optimizer import post_backward_models_are_masters

    with pytest.raises(RuntimeError, match=r"is not supplied - .* - change gradients after the block"):
        post_backward_models_are_masters(amp.scaler.LossScaler(), [], [])
