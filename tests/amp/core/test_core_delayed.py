"""``delay_unscale`` and ``delay_overflow_check``: blocks that leave the scale to the next block of their scaler."""

import pytest
import torch
from amp_training import INF, backward, loss_of, masters, net, same, sgd, start
from internals import float32_masters, process_state

from ampcompat import amp
from ampcompat.amp.observers import observing
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.scaling.adapter import Adapter, use

pytestmark = pytest.mark.device


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


def after_a_delayed_block(level, move):
    """A model and its optimizer after one delayed block, after which ``move`` moved the scale."""
    models = [net(0), net(1)]
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], opt_level=level, loss_scale=None, verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**12
    backward(models[0], optimizers[0], 1, delay_unscale=True)
    move(scaler, (models[1], optimizers[1]))
    return models[0], optimizers[0]


@pytest.mark.cover(1)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_survive_a_changed_scale(level, move):
    """Gradients of one scale, added to by another delayed block and by one that is not, are right."""
    model, optimizer = after_a_delayed_block(level, move)
    backward(model, optimizer, 2, delay_unscale=True)
    backward(model, optimizer, 3)
    assert_close(level, grads(optimizer), summed(level, 1, 2, 3))


def test_at_scale_one_masters_accumulate_in_float32():
    model, optimizer = start("O5")
    backward(model, optimizer, 1)
    backward(model, optimizer, 2)
    got = {p.shape: p.grad for p in amp.master_params(optimizer)}
    want = {}
    for seed in (1, 2):
        model, _ = start("O5")
        loss_of(model, seed).backward()
        for p in model.parameters():
            want[p.shape] = want.get(p.shape, 0) + p.grad.float()
    assert all(torch.equal(got[shape], want[shape]) for shape in want if len(shape) == 2)


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**12, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_last_block_of_an_accumulation_holds_the_whole_sum(level, loss_scale):
    """Scripts average it over all ranks there by hand; here the other rank has nothing."""
    model, optimizer = start(level, loss_scale=loss_scale)
    for seed in (1, 2):
        backward(model, optimizer, seed, delay_unscale=True)
    with amp.scale_loss(loss_of(model, 3), optimizer) as scaled:
        scaled.backward()
        for param in model.parameters():
            param.grad.data.div_(2)
    assert_close(level, grads(optimizer), [grad / 2 for grad in summed(level, 1, 2, 3)])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_block_unscales(level):
    """Delayed ones, too: in ``p.grad``, in float32 for half weights."""
    model, optimizer = start(level)
    backward(model, optimizer, 1, delay_unscale=True)
    assert not optimizer._amp_stash.params_have_scaled_gradients
    assert_close(level, grads(optimizer), summed(level, 1))


def moves(scaler):
    return scaler.loss_scale(), scaler._unskipped


@pytest.mark.parametrize("by", ["block", "update_scale"])
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_next_block_of_a_scaler_or_the_script_moves_its_scale(level, overflows, by):
    """Once, for two delayed blocks; no step does, nor a look at masters, nor a block of another loss."""
    model, optimizer = start(level, loss_scale="dynamic", num_losses=2)
    first, second = amp._amp_state.loss_scalers
    for _ in range(2):
        backward(model, optimizer, times=INF if overflows else 1.0, delay_unscale=True)
    amp.master_params(optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is overflows
    optimizer.zero_grad()
    backward(model, optimizer, loss_id=1)
    assert moves(first) == (2.0**16, 0)
    assert moves(second) == (2.0**16, 1)
    if by == "block":
        backward(model, optimizer)
        assert not first._has_overflow  # of this block
    else:
        assert first.update_scale() is overflows
    assert moves(first) == ((2.0**15, 0) if overflows else (2.0**16, 1))
    assert moves(second) == (2.0**16, 1)


def test_an_overflow_whose_gradients_were_cleared_skips_the_step():
    model, optimizer = start("O1", loss_scale="dynamic")
    backward(model, optimizer, times=INF, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_a_delayed_block_cannot_be_declared_unscaled(level, loss_scale):
    """A script that divides by the scale, and then writes so, would divide twice."""
    model, optimizer = start(level, loss_scale=loss_scale)
    stash = optimizer._amp_stash
    backward(model, optimizer, 1, delay_unscale=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"= False after a .* unscaled the gradients already \(D55\)"):
            stash.params_have_scaled_gradients = False
        amp.master_params(optimizer)  # does not make it right
    optimizer.zero_grad()
    stash.params_have_scaled_gradients = False


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_may_be_declared_unscaled_at_the_end_of_an_accumulation(level):
    """They are, under apex too: nothing is divided twice."""
    model, optimizer = start(level)
    backward(model, optimizer, 1, delay_unscale=True)
    backward(model, optimizer, 1)
    unscaled = grads(optimizer)
    optimizer._amp_stash.params_have_scaled_gradients = False
    assert same(grads(optimizer), unscaled)


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
    """Every optimizer of the delayed block skips its step; the next block lowers the scale once."""
    model, optimizers = halves_of_one_model(level, shared=False)
    amp._amp_state.verbosity = 1
    before = [p.detach().clone() for p in model.parameters()]
    with amp.scale_loss(loss_of(model) * INF, optimizers, delay_unscale=True) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True]
    assert same(before, list(model.parameters()))
    assert {line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()} == {"32768.0"}
    backward(model, optimizers)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_delayed_gradients_of_a_shared_parameter(level):
    """The optimizer that steps last finds them, too."""
    model, (first, second) = halves_of_one_model(level, shared=True)
    backward(model, [first, second], 1, delay_unscale=True)
    backward(model, [first, second], 2, delay_unscale=True)
    want = dict(zip(dict(model.named_parameters()), summed(level, 1, 2), strict=True))
    first.step()
    names = [f"{part}.{name}" for part in ("b", "bn", "a") for name, _ in getattr(model, part).named_parameters()]
    assert_close(level, grads(second), [want[name] for name in names])
    second.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_optimizer_made_anew_has_delayed_gradients(level):
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
    """The end of the first counts the pass of the other."""
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
def test_delayed_gradients_survive_a_static_scale_that_becomes_one(level, scales):
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
    model.zero_grad()
    amp.initialize(model, new, opt_level="O2", verbosity=0, loss_scale=2.0**12)
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
def test_an_observer_that_raises_as_a_block_begins_leaves_it_closed(level):
    class Failing:
        def on_scaled_loss(self, block, scaled):
            raise ZeroDivisionError

    model, optimizer = start(level)
    backward(model, optimizer, 1)
    with observing(Failing()), pytest.raises(ZeroDivisionError):
        backward(model, optimizer, 2)
    assert not process_state()["open_blocks"]
    backward(model, optimizer, 2)
    assert_close(level, grads(optimizer), summed(level, 1, 2))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_pass_has_added_before_an_interrupt_stays(level):
    """As in plain torch: a KeyboardInterrupt before the first layer gets its gradient."""

    def stop(_):
        raise KeyboardInterrupt

    found = []
    for each in ("O0", level):
        model, optimizer = start(each)
        backward(model, optimizer, 1)
        hook = model.bn.weight.register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            backward(model, optimizer, 2)
        hook.remove()
        found.append(grads(optimizer))
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
    assert same(found[1][:2], summed(level, 1)[:2])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-3)  # half arithmetic


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
def test_an_accumulation_may_end_early(level):
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


@pytest.mark.parametrize("method", ["combined_flag", "defers_reduction"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_whose_exit_raises_is_closed(level, method, capsys):
    class Failing(Adapter):
        fails = True

        def combined_flag(self, flag, tensors):
            self.may_fail("combined_flag")
            return flag

        def defers_reduction(self, leaves):
            self.may_fail("defers_reduction")
            return False

        def may_fail(self, name):
            if type(self).fails and name == method:
                raise KeyboardInterrupt

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
