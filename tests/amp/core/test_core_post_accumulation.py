"""Overflows decided by the script: gradients are reduced once for all blocks of a step, as NVIDIA's BERT does it.

Its blocks leave the check to the script (``delay_overflow_check``). Before the step it lends the scaler its own
overflow buffer, which it has filled from the reduced gradients, and asks ``update_scale`` whether to skip.
"""

import pytest
import torch
from amp_training import INF, assert_masters_agree, backward, masters, same, sgd, start
from internals import float32_masters

from ampcompat import amp, amp_C, apex_C
from ampcompat.amp.scaler import LossScaler

pytestmark = pytest.mark.device


def scaler():
    return amp._amp_state.loss_scalers[0]


def scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def reduce(optimizer, buffer, other_rank=0.0, blocks=1):
    """Send the master gradients through one flat half tensor, to which another rank adds ``other_rank``."""
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat = torch.empty(sum(g.numel() for g in grads), dtype=torch.float16)
    views = apex_C.unflatten(flat, grads)
    buffer.zero_()
    amp_C.multi_tensor_scale(65536, buffer, [grads, views], scaler().loss_scale() / blocks)
    flat += other_rank
    buffer.zero_()
    amp_C.multi_tensor_scale(65536, buffer, [views, grads], 1.0 / scaler().loss_scale())


def give_up(model, optimizer):
    for param in (*float32_masters(optimizer), *model.parameters()):
        param.grad = None


def accumulate(model, optimizer, seeds, times=(1.0, 1.0)):
    for seed, factor in zip(seeds, times, strict=True):
        backward(model, optimizer, seed, factor, delay_overflow_check=True)


def step(model, optimizer, buffer, seeds=(1, 2), times=(1.0, 1.0), other_rank=0.0):
    """One step; returns whether the script skipped it."""
    accumulate(model, optimizer, seeds, times)
    reduce(optimizer, buffer, other_rank)
    scaler()._overflow_buf = buffer
    skipped = scaler().update_scale()
    if not skipped:
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
    give_up(model, optimizer)
    return skipped


OPTIMIZERS = pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["host", "found_inf"])


@OPTIMIZERS
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("times", [(INF, 1.0), (1.0, INF)])
def test_an_overflow_of_this_rank_skips_one_step_and_no_other(level, times, options, capsys):
    model, optimizer = start(level, lambda m: sgd(m, **options))
    buffer = torch.zeros(1, dtype=torch.int)
    assert step(model, optimizer, buffer) is False
    before, first = masters(optimizer), scale()
    assert step(model, optimizer, buffer, times=times) is True
    assert same(masters(optimizer), before)
    assert scale() == first / 2
    assert step(model, optimizer, buffer) is False  # what the skipped blocks noted is decided
    assert not same(masters(optimizer), before)
    assert scale() == first / 2
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))
    assert "Gradient overflow" not in capsys.readouterr().out  # the script says so itself


@OPTIMIZERS
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_that_overflow_and_ranks_that_do_not_stay_alike(level, options):
    """An overflow of another rank skips here as one of this rank does."""
    ends = []
    for times, other in (((INF, 1.0), 0.0), ((1.0, 1.0), INF)):
        model, optimizer = start(level, lambda m: sgd(m, **options))
        buffer = torch.zeros(1, dtype=torch.int)
        skips = [step(model, optimizer, buffer)]
        skips += [step(model, optimizer, buffer, times=times, other_rank=other)]
        skips += [step(model, optimizer, buffer, (at, at + 1)) for at in range(3)]
        ends.append((skips, masters(optimizer), amp.state_dict()))
    assert ends[0][0] == ends[1][0] == [False, True, False, False, False]
    assert same(ends[0][1], ends[1][1])
    if level == "O2":
        assert_masters_agree(model)
    assert ends[0][2] == ends[1][2] == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 3}}


@pytest.mark.parametrize("blocks", [1, 100])  # many: flags are joined
def test_update_scale_alone_takes_the_decision_over(blocks):
    model, optimizer = start("O2")
    for at in range(blocks):
        backward(model, optimizer, at % 3, INF if at == 0 else 1.0, delay_overflow_check=True)
    assert scaler().update_scale() is True
    assert scale() == 2.0**15
    give_up(model, optimizer)
    backward(model, optimizer, 1, delay_overflow_check=True)
    before = masters(optimizer)
    assert scaler().update_scale() is False
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert not same(masters(optimizer), before)


def test_nobody_asks_and_the_overflow_skips_as_ever():
    model, optimizer = start("O2")
    scaler()._overflow_buf = torch.zeros(1, dtype=torch.int)
    before = masters(optimizer)
    backward(model, optimizer, 1, INF, delay_overflow_check=True)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)


@pytest.mark.parametrize("first", ["checked", "unchecked"])
def test_update_scale_keeps_what_a_block_found(first):
    """``update_scale`` after two blocks does not undo an overflow that one of them checked: the step is skipped."""
    model, optimizer = start("O2")
    before = masters(optimizer)
    backward(model, optimizer, 1, INF if first == "checked" else 1.0)
    backward(model, optimizer, 2, 1.0 if first == "checked" else INF, delay_overflow_check=first == "checked")
    scaler().update_scale()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)


@pytest.mark.parametrize("delay", [True, False])
def test_a_lent_buffer_holds_what_the_last_block_noted(delay):
    model, optimizer = start("O2")
    buffer = torch.zeros(1, dtype=torch.int)
    scaler()._overflow_buf = buffer
    for times, want in ((1.0, 0), (INF, 1), (1.0, 0)):
        backward(model, optimizer, 1, times, delay_overflow_check=delay)
        give_up(model, optimizer)
        assert buffer.tolist() == scaler()._overflow_buf.tolist() == [want]
    assert scaler()._overflow_buf is buffer
    buffer.fill_(1)
    scaler().clear_overflow_state()
    assert buffer.tolist() == [0]


def test_gradients_unscaled_by_hand_count_beside_the_buffer():
    by_hand = LossScaler("dynamic")
    by_hand._overflow_buf = torch.zeros(1, dtype=torch.int)
    by_hand.copy_on(torch.device("cpu"))
    by_hand.unscale_grads([torch.tensor([INF])])
    assert by_hand.update_scale() is True
    by_hand.clear_overflow_state()
    by_hand.unscale_grads([torch.ones(1)])
    assert by_hand.update_scale() is False


def test_a_static_scale_never_skips():
    model, optimizer = start("O2", loss_scale=128.0)
    buffer = torch.zeros(1, dtype=torch.int)
    assert step(model, optimizer, buffer, times=(1.0, INF)) is False
    assert scale() == 128.0


@pytest.mark.parametrize("bad", [None, 0, [0], torch.zeros(2, dtype=torch.int)])
def test_a_buffer_is_a_tensor_of_one_element(bad):
    start("O2")
    with pytest.raises(TypeError, match="_overflow_buf"):
        scaler()._overflow_buf = bad
    assert scaler()._overflow_buf.tolist() == [0]


def test_steps_are_those_of_blocks_that_check():
    ends = []
    for by_script in (True, False):
        model, optimizer = start("O2")
        scaler()._overflow_buf = torch.zeros(1, dtype=torch.int)
        for at in range(4):
            for seed in (at, at + 1):
                backward(model, optimizer, seed, delay_overflow_check=by_script)
            assert not by_script or scaler().update_scale() is False
            optimizer.step()
            give_up(model, optimizer)
        ends.append(masters(optimizer))
    assert same(*ends)
