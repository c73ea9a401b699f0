"""``step(closure)``: apex refused it."""

import pytest
import torch
from amp_training import INF, Net, assert_masters_agree, backward, batch, loss_of, masters, net, same, start
from internals import float32_masters, overflow_flags, skipped_as_far_as_known

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]

MAKERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, fused=True),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
}


class Calls:
    """A closure that counts its evaluations and blows up in those that it is told to."""

    def __init__(self, model, optimizer, bad=(), scaled=True):
        self.model, self.optimizer, self.bad, self.scaled, self.count = model, optimizer, bad, scaled, 0

    def __call__(self):
        assert torch.is_grad_enabled()
        loss = loss_of(self.model)
        factor = INF if self.count in self.bad else 1.0
        self.count += 1
        self.optimizer.zero_grad()
        if not self.scaled:
            loss.backward()
            return loss.detach()
        with amp.scale_loss(loss * factor, self.optimizer) as scaled:
            scaled.backward()
        return loss.detach()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_closures_train(level, kind):
    model, optimizer = start(level, MAKERS[kind])
    closure = Calls(model, optimizer)
    losses = [float(optimizer.step(closure)) for _ in range(5)]
    assert losses[-1] < losses[0] * 0.95
    assert not amp.step_was_skipped(optimizer)
    if level in ("O2", "O5"):
        assert_masters_agree(model)


@pytest.mark.parametrize("kind", MAKERS)
def test_at_o0_bitwise_plain_pytorch(kind):
    model, optimizer = start("O0", MAKERS[kind])
    plain = net()
    plain_optimizer = MAKERS[kind](plain)
    for _ in range(3):
        got = optimizer.step(Calls(model, optimizer))
        assert torch.equal(got, plain_optimizer.step(Calls(plain, plain_optimizer, scaled=False)))
    assert same(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adam fused"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_with_one_evaluation_bitwise_the_step_without_a_closure(level, kind):
    model, optimizer = start(level, MAKERS[kind])
    twin, twin_optimizer = start(level, MAKERS[kind], model=net())
    for _ in range(3):
        optimizer.step(Calls(model, optimizer))
        Calls(twin, twin_optimizer)()
        twin_optimizer.step()
    assert same(masters(optimizer), masters(twin_optimizer))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_the_first_evaluation_skips_the_step(level, kind, capsys):
    model, optimizer = start(level, MAKERS[kind])
    before = masters(optimizer)
    closure = Calls(model, optimizer, bad=[0])
    loss = optimizer.step(closure)
    assert torch.is_tensor(loss)
    assert closure.count == 1
    assert amp.step_was_skipped(optimizer)
    assert same(before, masters(optimizer))
    assert kind == "LBFGS" or not optimizer.state_dict()["state"]  # which counts evaluations
    assert (
        capsys.readouterr().out == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )
    optimizer.step(closure)
    assert not amp.step_was_skipped(optimizer)
    assert not same(before, masters(optimizer))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_a_later_overflow_the_optimizer_keeps_what_it_has(level, search, capsys):
    """LBFGS calls its closure several times. It stops where it is, and nothing claims that a step was skipped."""
    model, optimizer = start(level, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn=search))
    before = masters(optimizer)
    optimizer.step(Calls(model, optimizer, bad=[2]))
    assert not amp.step_was_skipped(optimizer)
    assert capsys.readouterr().out == ""
    assert not same(before, masters(optimizer))
    assert all(param.isfinite().all() for param in masters(optimizer))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] < 2.0**16
    for _ in range(3):
        optimizer.step(Calls(model, optimizer))
    assert all(param.isfinite().all() for param in masters(optimizer))
    if level == "O2":
        assert_masters_agree(model)


def test_each_evaluation_is_one_backward_pass():
    model, optimizer = start("O2", MAKERS["LBFGS"])
    closure = Calls(model, optimizer)
    optimizer.step(closure)
    assert closure.count > 1
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": closure.count}


def test_the_closure_has_the_casts_of_its_caller():
    seen = []
    model, optimizer = start("O1", MAKERS["SGD"])

    def closure():
        seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return Calls(model, optimizer)()

    optimizer.step(closure)
    with amp.disable_casts():
        optimizer.step(closure)
    assert seen == [torch.float16, torch.float32]
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_an_exception_in_the_closure_leaves_everything_usable(level, kind):
    model, optimizer = start(level, MAKERS[kind])
    inner = Calls(model, optimizer)

    def closure():
        if inner.count == 0:
            raise KeyError("mine")
        return inner()

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    x, _ = batch()
    model(x)
    if level == "O2":
        assert_masters_agree(model)
    assert float(optimizer.step(Calls(model, optimizer))) > 0


def test_a_closure_by_keyword_and_one_that_delays():
    model, optimizer = start("O2", MAKERS["SGD"])
    before = masters(optimizer)

    def closure():
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model, part) / 2
            with amp.scale_loss(loss, optimizer, delay_unscale=part == 0) as scaled:
                scaled.backward()
        return loss

    optimizer.step(closure=closure)
    assert not same(before, masters(optimizer))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_no_scheduler_warning_after_a_skipped_closure():
    model, optimizer = start("O2", MAKERS["LBFGS"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step(Calls(model, optimizer, bad=[0]))
    scheduler.step()


def test_a_fused_step_with_closure_is_decided():
    """Fused Adam takes ``found_inf`` and skips by itself; with a closure, amp knows at once that it skipped."""
    model, optimizer = start("O2", MAKERS["Adam fused"], model=Net())
    optimizer.step(Calls(model, optimizer, bad=[0]))
    assert skipped_as_far_as_known(optimizer) is True


class SAM(torch.optim.Optimizer):
    """As published: steps uphill with the gradients it finds, asks for those up there, steps from where it was."""

    def __init__(self, params, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def sam(model):
    return SAM(model.parameters(), lr=0.02, momentum=0.9)


def plain_sam(seeds):
    model = net()
    optimizer = sam(model)

    def closure():
        loss = loss_of(model, seed)
        loss.backward()
        return loss

    for seed in seeds:
        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def amp_sam(model, optimizer, seed, bad=(), delay=False):
    """One step; ``bad``: which of its two backward passes overflow; ``delay``: the first leaves gradients scaled."""
    count = 0

    def closure():
        nonlocal count
        loss = loss_of(model, seed)
        loss = loss * (INF if count in bad else 1.0)
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not count) as scaled:
            scaled.backward()
        count += 1
        return loss

    closure()
    optimizer.step(closure)
    optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_an_optimizer_that_asks_in_the_middle_of_its_step(level):
    want = plain_sam(range(4))
    model, optimizer = start(level, sam)
    for seed in range(4):
        amp_sam(model, optimizer, seed)
    for ours, theirs in zip(masters(optimizer), want, strict=True):
        # As far as half precision goes after four steps of 0.02; without the gradients up there it is the start.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if level == "O0" else 2e-3)
    if level in ("O2", "O5"):
        assert_masters_agree(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_first_overflow_skips_the_whole_step(level):
    want = plain_sam([0, 2, 3])
    model, optimizer = start(level, sam)
    amp_sam(model, optimizer, 0)
    before = masters(optimizer)
    amp_sam(model, optimizer, 1, bad=(0,))
    assert amp.step_was_skipped(optimizer)
    assert same(before, masters(optimizer))
    for seed in (2, 3):
        amp_sam(model, optimizer, seed)
        assert not amp.step_was_skipped(optimizer)
    for ours, theirs in zip(masters(optimizer), want, strict=True):
        # One batch-norm forward more, whose statistics training does not read.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize("loss_scale", [128.0, "dynamic"])
def test_a_weight_written_before_its_step_is_stepped_from(loss_scale):
    """At any scale, the evaluation up there sees the weight that was written, and moved uphill from."""

    class InPlace(SAM):
        @torch.no_grad()
        def first_step(self, zero_grad=False):
            for p in self.param_groups[0]["params"]:
                self.state[p]["old_p"] = p.clone()
                p.add_(p.grad.sign(), alpha=0.05)
            self.zero_grad()

    model, optimizer = start("O2", lambda m: InPlace(m.parameters(), lr=0.02), loss_scale=loss_scale)
    seen = []

    def closure():
        seen.append(model.a.weight.detach().clone())
        return backward(model, optimizer)

    closure()
    with torch.no_grad():
        model.a.weight.fill_(0.25)
    optimizer.step(closure)
    half = torch.float16
    assert {value.item() for value in seen[1].unique()} == {torch.tensor(x, dtype=half).item() for x in (0.2, 0.3)}


@pytest.mark.parametrize("bad", [(), (0,), (1,)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_does_not_see_gradients_that_were_left_scaled(level, bad):
    (model, optimizer), (twin, twin_optimizer) = start(level, sam), start(level, sam, model=net())
    for seed in range(2):
        amp_sam(model, optimizer, seed, bad if seed else (), delay=True)
        amp_sam(twin, twin_optimizer, seed, bad if seed else ())
    assert amp.step_was_skipped(optimizer) is (0 in bad)
    assert all(param.isfinite().all() for param in masters(optimizer))
    assert same(masters(optimizer), masters(twin_optimizer))


def test_blocks_before_a_step_keep_a_flag_for_each_scaler_and_lose_none(capsys):
    model, optimizer = start("O1", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), num_losses=2)
    before = masters(optimizer)
    for block in range(200):
        loss = model.b.weight.sum() * (INF if block == 3 else 0.0)
        with amp.scale_loss(loss, optimizer, loss_id=block % 2) as scaled:
            scaled.backward()
    assert overflow_flags(optimizer) == 2
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(before, masters(optimizer))
    said = capsys.readouterr().out
    assert "loss scaler 1 reducing" in said
    assert "loss scaler 0" not in said


def test_a_plain_backward_in_a_closure_is_named():
    model, optimizer = start("O2", MAKERS["SGD"])
    held = float32_masters(optimizer)
    before = [p.detach().clone() for p in held]
    with pytest.warns(UserWarning, match="no scale_loss block"):
        optimizer.step(Calls(model, optimizer, scaled=False))
    assert same(before, held)


def test_a_later_overflow_where_the_optimizer_clears_gradients():
    """The closure calls no ``zero_grad``: the optimizer does, inside its step."""

    class Twice(torch.optim.SGD):
        def step(self, closure):
            self.zero_grad()
            closure()
            self.zero_grad()
            closure()
            return super().step()

    model, optimizer = start("O2", lambda m: Twice(m.parameters(), lr=0.1))
    count = 0

    def closure():
        nonlocal count
        loss = loss_of(model)
        with amp.scale_loss(loss * (INF if count == 1 else 1.0), optimizer) as scaled:
            scaled.backward()
        count += 1
        return loss

    optimizer.step(closure)
    assert not amp.step_was_skipped(optimizer)
    assert all(torch.isfinite(p).all() for p in masters(optimizer))
