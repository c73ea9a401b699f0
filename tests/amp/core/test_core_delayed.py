"""``delay_unscale`` and ``delay_overflow_check``: scaled gradients that wait while the scale may move."""

import warnings

import pytest
import torch
import torch.distributed as dist
from core_kit import backward, loss_of, masters, net, same, sgd, start
from internals import float32_masters, has_scaled_gradients, process_state

from ampcompat import amp
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.scaling.adapter import Adapter, use

INF = float("inf")


def grads(optimizer):
    return [p.grad.clone() for p in amp.master_params(optimizer)]


def summed(level, *seeds):
    """The sum of the unscaled gradients of one block each."""
    parts = []
    for seed in seeds:
        model, optimizer = start(level, loss_scale=2.0**12)
        backward(model, optimizer, seed)
        parts.append(grads(optimizer))
    return [sum(column[1:], column[0]) for column in zip(*parts, strict=True)]


def assert_close(level, got, want):
    for one, other in zip(got, want, strict=True):
        if level in ("O0", "O1"):  # float32 gradients times powers of two; sums of three in either order
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        else:  # half gradients: their sum rounds once more than the float32 one
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


def overflow_elsewhere(scaler, second):
    backward(*second, times=INF)
    second[1].step()


def growth_elsewhere(scaler, second):
    scaler._unskipped = 1999
    backward(*second)


def written(scaler, second):
    scaler._loss_scale = 2.0**9


def loaded(scaler, second):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}})


def loaded_by_the_scaler(scaler, second):
    """As ``torch.amp.GradScaler`` has it: it fills the tensors that there are."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**10, "_growth_tracker": 7})


def filled(scaler, second):
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**10})


def replaced(scaler, second):
    amp._amp_state.loss_scalers[0] = LossScaler(2.0**11)


def unmoved(scaler, second):
    pass


MOVES = [overflow_elsewhere, growth_elsewhere, written, loaded, loaded_by_the_scaler, filled, replaced, unmoved]


def waiting(level, move):
    """An optimizer with the scaled gradients of one delayed block, after which ``move`` moved the scale."""
    models = [net(0), net(1)]
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], opt_level=level, loss_scale=None, verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**12
    backward(models[0], optimizers[0], 1, delay_unscale=True)
    move(scaler, (models[1], optimizers[1]))
    return models[0], optimizers[0]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_waiting_gradients_survive_a_changed_scale(level, move):
    """Gradients that were scaled by one scale, added to by another delayed block, and unscaled at last, are right."""
    model, optimizer = waiting(level, move)
    backward(model, optimizer, 2, delay_unscale=True)
    assert has_scaled_gradients(optimizer)
    backward(model, optimizer, 3)
    assert_close(level, grads(optimizer), summed(level, 1, 2, 3))


def test_at_scale_one_waiting_gradients_are_not_written():
    """Gradients that wait for their unscale at a scale of one are not multiplied by it."""
    model, optimizer = start("O5")
    backward(model, optimizer, 1, delay_unscale=True)
    waiting = [p.grad._version for p in model.parameters()]
    with amp.scale_loss(loss_of(model, 2), optimizer) as loss:
        inside = [p.grad._version for p in model.parameters()]
        loss.backward()
    assert inside == waiting
    got, (model, _) = {p.shape: p.grad for p in amp.master_params(optimizer)}, start("O5")
    loss_of(model, 1).backward()
    loss_of(model, 2).backward()
    assert all(torch.equal(got[p.shape], p.grad.float()) for p in model.parameters() if p.dim() == 2)


def test_a_delayed_overflow_check_says_the_scale_that_will_be(capsys):
    model, optimizer = start("O2")
    backward(model, optimizer, 1, times=INF, delay_overflow_check=True)
    optimizer.step()
    said = capsys.readouterr().out
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    assert scale == 2.0**15
    assert said == f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"


def test_so_it_does_where_the_optimizer_skips_on_the_device(capsys):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", min_loss_scale=2.0**15.5, verbosity=0)
    amp._amp_state.verbosity = 1
    backward(model, optimizer, 1, times=INF, delay_overflow_check=True)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    scale = float(torch.tensor(2.0**15.5))  # the floor, as float32 holds it
    said = capsys.readouterr().out
    assert said == f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"
    backward(model, optimizer, 2)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale


def test_a_clean_delayed_check_lowers_nothing(capsys):
    """The message of a skip names the scale that the next block will have."""
    model, optimizer = start("O2")
    backward(model, optimizer, 1, times=INF)
    backward(model, optimizer, 1, delay_overflow_check=True)
    optimizer.step()
    said = capsys.readouterr().out
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    assert said == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_may_move_inside_a_block(level, move):
    """A block unscales by the scale that it began with."""
    models = [net(0), net(1)]
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], opt_level=level, verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**12
    for delay in (True, False):
        with amp.scale_loss(loss_of(models[0], 1), optimizers[0], delay_unscale=delay) as scaled:
            move(scaler, (models[1], optimizers[1]))
            scaled.backward()
    assert_close(level, grads(optimizers[0]), summed(level, 1, 1))


def halves_of_one_model(level, shared):
    """A model whose layers belong to two optimizers, and the middle one to both if ``shared``."""
    model = net()
    first, second = [model.a, model.bn], [model.b, *([model.bn, model.a] if shared else [])]
    optimizers = [torch.optim.SGD([p for m in part for p in m.parameters()], lr=0.1) for part in (first, second)]
    return amp.initialize(model, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_overflow_counts_once(level, capsys):
    """It lowers the scale once, and every optimizer of the delayed block skips its step."""
    model, optimizers = halves_of_one_model(level, shared=False)
    amp._amp_state.verbosity = 1
    before = [p.detach().clone() for p in model.parameters()]
    with amp.scale_loss(loss_of(model) * INF, optimizers, delay_unscale=True) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True]
    assert same(before, list(model.parameters()))
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15
    assert {line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()} == {"32768.0"}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_pending_gradients_of_a_shared_parameter(level):
    """Whichever optimizer steps first unscales them, once, for both."""
    model, (first, second) = halves_of_one_model(level, shared=True)
    backward(model, [first, second], 1, delay_unscale=True)
    backward(model, [first, second], 2, delay_unscale=True)
    want = dict(zip(dict(model.named_parameters()), summed(level, 1, 2), strict=True))
    first.step()
    names = [f"{part}.{name}" for part in ("b", "bn", "a") for name, _ in getattr(model, part).named_parameters()]
    assert_close(level, grads(second), [want[name] for name in names])
    second.step()
    assert amp._amp_state.loss_scalers[0]._unskipped == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_optimizer_made_anew_has_the_pending_gradients(level):
    """A script leaves an accumulation unfinished, and goes on with another optimizer and another scale."""
    model, before = start(level, loss_scale=2.0**12)
    backward(model, before, 1, delay_unscale=True)
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=2.0**10)
    backward(model, optimizer, 2)
    assert_close(level, grads(optimizer), summed(level, 1, 2))
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_block_that_ends_one_accumulation_and_goes_on_with_another(level):
    """The end of the first moves the scale that the gradients of the other are brought to."""
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    models, optimizers = amp.initialize(
        models, [sgd(model) for model in models], opt_level=level, loss_scale="dynamic", verbosity=0
    )
    (scaler,) = amp._amp_state.loss_scalers
    scaler._loss_scale, scaler._scale_seq_len = 2.0**10, 1

    def block(*places, **kwargs):
        loss = sum(models[place](torch.ones(1, 1)).sum() for place in places)
        with amp.scale_loss(loss, [optimizers[place] for place in places], **kwargs) as scaled:
            scaled.backward()

    block(0, delay_unscale=True)
    block(1, 2, delay_unscale=True)
    block(0, 1)
    assert [grads(optimizer)[0].item() for optimizer in optimizers] == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("scales", [(128.0, 1.0), (1.0, 128.0), (1.0, 1.0)])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gradients_left_scaled_survive_a_static_scale_that_becomes_one(level, scales):
    model, optimizer = start(level, model=torch.nn.Linear(1, 1, bias=False), loss_scale=scales[0])
    for scale in scales:
        amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer, delay_unscale=True) as scaled:
            scaled.backward()
    assert grads(optimizer)[0].item() == 2.0


@pytest.mark.parametrize("delay_unscale", [True, False])
def test_an_optimizer_made_anew_takes_the_place_of_the_old_one(delay_unscale):
    """The old one is a reference cycle, and nothing waits for its step until the garbage is collected."""
    model, old = start("O2", loss_scale=2.0**12)
    backward(model, old, 1, delay_unscale=delay_unscale)
    del old
    new = sgd(model)
    if not delay_unscale:
        model.zero_grad()  # otherwise the gradients are dropped, with a warning
    amp.initialize(model, new, opt_level="O2", verbosity=0, loss_scale=2.0**12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (2, 3):
            backward(model, new, seed)
            new.step()
    assert all(p.grad is None for p in float32_masters(new))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_loss_that_cannot_be_scaled_leaves_the_block_closed(level):
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    accumulated = grads(optimizer)

    class Unwilling(torch.Tensor):
        def float(self, *args, **kwargs):
            raise MemoryError

    with pytest.raises(MemoryError), amp.scale_loss(Unwilling(), optimizer):
        pass
    assert not process_state()["open_blocks"]
    assert same(grads(optimizer), accumulated)
    backward(model, optimizer, 2)
    assert_close(level, grads(optimizer), summed(level, 1, 2))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_cannot_unscale_moves_nothing(level, monkeypatch, capsys):
    """Unscaling pending gradients raises in ``step``: they are dropped, and the next step has nothing to use."""
    model, optimizer = start(level)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    backward(model, optimizer, 1, delay_unscale=True)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ampcompat.amp.scaling.between_blocks.unscale_new", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))
    optimizer.step()
    assert same(before, [p.detach() for p in amp.master_params(optimizer)])
    assert "to be unscaled are cleared" in capsys.readouterr().out
    backward(model, optimizer, 1)
    assert_close(level, grads(optimizer), summed(level, 1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_interrupt_keeps_earlier_gradients(level):
    """A KeyboardInterrupt in the backward pass leaves gradients as they were before the block."""
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    before = grads(optimizer)

    def stop(_):
        raise KeyboardInterrupt

    hook = model.a.weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        backward(model, optimizer, 2)
    hook.remove()
    assert same(before, grads(optimizer))
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_overflow_leaves_no_momentum_of_fused_sgd(level):
    """torch's fused SGD leaves the momentum that its first step makes uninitialised, if told to skip it."""
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    backward(model, optimizer, 1, times=INF, delay_unscale=True)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert not any("momentum_buffer" in held for held in optimizer.state.values())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_master_params_are_unscaled_where_an_accumulation_ends_early(level):
    """``delay_unscale=(i + 1) % n != 0``, and a step at the last batch: it clips before it steps."""
    (model, optimizer), (twin, twin_optimizer) = start(level), start(level, model=net())
    for seed in range(3):
        backward(model, optimizer, seed, delay_unscale=True)
        backward(twin, twin_optimizer, seed, delay_unscale=seed < 2)
    norms = [torch.nn.utils.clip_grad_norm_(amp.master_params(one), 1e-3) for one in (optimizer, twin_optimizer)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)  # the sum of another order
    optimizer.step()
    twin_optimizer.step()
    for ours, theirs in zip(masters(optimizer), masters(twin_optimizer), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_master_params_read_in_the_block_of_another_optimizer_stay_scaled():
    models = [net(0), net(1)]
    models, (a, b) = amp.initialize(models, [sgd(model) for model in models], opt_level="O1", verbosity=0)
    backward(models[0], a, delay_unscale=True)
    with amp.scale_loss(loss_of(models[1]), b) as scaled:
        list(amp.master_params(a))
        assert has_scaled_gradients(a)
        scaled.backward()
    list(amp.master_params(a))
    assert not has_scaled_gradients(a)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_whose_exit_raises_is_closed(level, capsys):
    class Failing(Adapter):
        fails = True

        def defers_reduction(self, leaves):
            if type(self).fails:
                raise KeyboardInterrupt
            return False

    model, optimizer = start(level)
    use(Failing)
    with pytest.raises(KeyboardInterrupt):
        backward(model, optimizer)
    Failing.fails = False
    assert all(p.grad is None for p in model.parameters())
    assert "to be unscaled are cleared" in capsys.readouterr().out
    backward(model, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def test_master_params_while_gradients_wait_for_other_processes(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, optimizer = start("O1")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        with wrapped.no_sync():
            backward(wrapped, optimizer)
        with pytest.warns(UserWarning, match=r"while gradients of no_sync\(\) wait"):
            amp.master_params(optimizer)
        assert has_scaled_gradients(optimizer)
        backward(wrapped, optimizer)
        amp.master_params(optimizer)
        assert not has_scaled_gradients(optimizer)
    finally:
        dist.destroy_process_group()
