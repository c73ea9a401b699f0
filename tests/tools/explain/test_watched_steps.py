"""Faults that running a forward again does not show: from the first lost step on, explain watches whole steps."""

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from amp_training import initialized, make_step
from explain_kit import explain, last_words, told
from internals import reset
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows

WORDS = torch.linspace(-1, 1, 32).view(4, 8)


def started(model, level="O1", **options):
    torch.manual_seed(0)
    model, optimizer = initialized(model, level, lr=1e-6, **options)
    explain()
    return model, optimizer


def gradient_penalty(steps=12):
    """Its norm is 0 where the critic does not depend on the input: the root has no gradient there."""
    critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(critic[0].bias, -100.0)
    critic, optimizer = started(critic)
    for _ in range(steps):
        optimizer.zero_grad()
        mixed = WORDS.clone().requires_grad_()
        loss = critic(WORDS).float().mean() - critic(-WORDS).float().mean()
        (grad,) = torch.autograd.grad(critic(mixed).float().sum(), mixed, create_graph=True)
        penalty = ((grad.pow(2).sum(1).sqrt() - 1) ** 2).mean()  # here
        make_step(optimizer, loss + penalty)


def reused_buffer(steps=6):
    """The batch lies in one tensor, which holds the next batch when the step comes."""
    model, optimizer = started(nn.Linear(8, 8))
    batch = torch.zeros(4, 8)
    for step in range(steps):
        optimizer.zero_grad()
        batch.copy_(WORDS)
        if step > 1:
            batch.div_(batch - batch)  # here
        loss = model(batch).float().pow(2).mean()
        batch.copy_(WORDS)
        make_step(optimizer, loss)


def iterator_as_input(steps=6):
    """It is exhausted once the forward has run."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, parts):
            return sum(torch.exp(self.fc(part).float() * 1e3) for part in parts)  # here

    model, optimizer = started(Sums())
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, model(iter([WORDS, WORDS])).mean())


def counter(steps=6):
    """Each second call of the forward multiplies by what float16 does not hold."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            h = self.fc(x)
            if self.calls % 2 == 0:
                h = h * 1e6  # here
            return self.head(h)

    model, optimizer = started(Counts(), "O2")
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().pow(2).mean())


def empty_mask(steps=6):
    """The loss of one micro-batch of four is 0 / 0."""
    model, optimizer = started(nn.Linear(8, 8))
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(4):
            mask = torch.full((4,), float(part != 2))
            total = (model(WORDS).float().pow(2).mean(1) * mask).sum()
            loss = total / mask.sum()  # here
            with amp.scale_loss(loss / 4, optimizer) as scaled:
                scaled.backward()
        optimizer.step()


def standardized_batch(steps=12):
    """A column of some batches is constant: what computes the input divides by zero."""
    model, optimizer = started(nn.Linear(8, 8))
    for step in range(steps):
        optimizer.zero_grad()
        batch = WORDS.clone()
        if step % 5 == 2:
            batch[:, 3] = 1.0
        batch = (batch - batch.mean(0)) / batch.std(0)  # here
        make_step(optimizer, model(batch).float().pow(2).mean())


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (gradient_penalty, "sqrt"),
        (reused_buffer, "div_"),
        (iterator_as_input, "exp"),
        (counter, "mul"),
        (empty_mask, "div"),
        (standardized_batch, "div"),
    ],
)
def test_the_line_is_named(run, what, capsys):
    run()
    seen = told(capsys)
    assert seen.lines[-1].endswith("# here")
    assert what == seen.last["op" if what == "div_" else "function"].replace("truediv", "div")


def test_all_lost_steps_are_counted(capsys):
    """Nothing skips at a static scale: what is lost is counted by explain itself, to the last step."""
    model, optimizer = started(nn.Linear(8, 8), loss_scale=1.0)
    for step in range(60):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().pow(2).mean() * (float("nan") if step >= 5 else 1))
    assert told(capsys).counts["lost"] == {"loss": 55}


def test_a_normal_skip_takes_no_explanation(capsys):
    """The first steps are skipped as the scale comes down; then three faults of other kinds come."""
    torch.manual_seed(0)
    model, optimizer = started(nn.Linear(8, 8), "O2")
    for step in range(40):
        x = WORDS.clone()
        optimizer.zero_grad()
        if step == 12:
            x[1, 2] = float("nan")
        y = model(x).float()
        loss = (y * 300).sum()
        if step in (15, 16, 17):
            loss = loss + torch.log((y * 0).sum())
        if step in (25, 26, 27):
            loss = loss + ((y * 0).sum() - 1).sqrt()
        make_step(optimizer, loss)
    assert [fault["op"] for fault in told(capsys).faults] == ["input 0 of Linear", "log", "sqrt"]


def test_a_batch_that_the_script_drops_is_no_lost_step(capsys):
    """It clears the gradients of a loss that is not finite, and makes no step; those that it makes are well."""
    model, optimizer = started(nn.Linear(8, 8))
    for batch in range(8):
        optimizer.zero_grad()
        loss = (model(WORDS * (1e9 if batch % 3 == 1 else 1))).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if torch.isfinite(loss):
            optimizer.step()
    seen = told(capsys)
    assert seen.first["see"] == ["too large"]
    assert (seen.counts["steps"], seen.counts["lost"]) == (5, {})


def test_a_warning_of_torch_is_of_the_scripts_line(recwarn):
    """Explain calls torch's functions in the script's place while it watches."""

    class Warns(nn.Linear):
        def forward(self, x):
            return F.softmax(super().forward(x)) * float("nan")  # without a dim: torch warns

    model, optimizer = started(Warns(8, 8))
    for _ in range(6):
        make_step(optimizer, model(WORDS).float().mean())
        optimizer.zero_grad()
    warned = [one for one in recwarn if "Implicit dimension choice" in str(one.message)]
    assert {one.filename for one in warned} == {__file__}
    assert {one.lineno for one in warned} == {
        test_a_warning_of_torch_is_of_the_scripts_line.__code__.co_firstlineno + 5
    }
    assert not [one for one in recwarn if "ampcompat" in one.filename]


@pytest.mark.parametrize("mode", [FlopCounterMode, lambda display: torch.device("cpu")], ids=["dispatch", "function"])
def test_a_mode_that_the_script_leaves_is_its_own(mode, capsys):
    """It is entered before a step and left after it: the watch begins between the two."""
    model, optimizer = started(nn.Linear(8, 8))
    for _ in range(4):
        optimizer.zero_grad()
        with mode(display=False) as entered:
            make_step(optimizer, torch.log(model(WORDS).float() * 0).mean())
    if isinstance(entered, FlopCounterMode):
        assert entered.get_total_flops() > 0
    assert told(capsys).last["op"] == "log"
    explain_overflows()  # ends the watch
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.overrides._get_current_function_mode() is None


def test_an_error_ends_the_watch(capsys):
    model, optimizer = started(nn.Linear(8, 8))
    make_step(optimizer, torch.log(model(WORDS).float() * 0).mean())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(4, 7))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_steps_are_watched_in_bounds(monkeypatch, capsys):
    """What no op shows is not looked for without an end; steps are counted all the same."""
    monkeypatch.setattr("ampcompat.tools.explain.watch.WATCHED", 2)
    monkeypatch.setattr("ampcompat.tools.explain.watch.MOST_WATCHED", 3)
    monkeypatch.setattr("ampcompat.tools.explain.again.MOST_RUN_AGAIN", 3)
    model, optimizer = started(nn.Linear(8, 8))
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(WORDS).float().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            numpy_of(model.weight.grad)[0] = float("nan")  # no op of torch's
        optimizer.step()
    seen = told(capsys)
    assert (seen.counts["skipped"], seen.faults, len(seen.unknown)) == (30, [], 1)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_watch_that_a_block_without_optimizers_has_begun_ends_too(monkeypatch):
    """The gradient of an input is asked for once, at the start; the training after it is well."""
    monkeypatch.setattr("ampcompat.tools.explain.watch.WATCHED", 2)
    model, optimizer = started(nn.Linear(8, 8))
    words = WORDS.clone().requires_grad_()
    with amp.scale_loss(torch.log(model(words).float() * 0).mean(), []) as scaled:
        scaled.backward()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    for _ in range(2):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().mean())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_overflows_that_persist_are_told_from_what_a_watched_step_has_shown(monkeypatch, capsys):
    """The gradient grows as fast as the scale falls, and the watch has ended before that is known."""
    monkeypatch.setattr("ampcompat.tools.explain.watch.WATCHED", 2)
    monkeypatch.setattr("ampcompat.tools.explain.watch.MOST_WATCHED", 3)
    model, optimizer = started(nn.Linear(8, 8), "O2")
    for step in range(20):
        optimizer.zero_grad()
        make_step(optimizer, (model(WORDS).float() * 2.0 ** max(step - 8, -8)).sum())
    seen = told(capsys)
    assert (seen.first["step"], seen.first["see"]) == (20, ["gradient"])
    assert seen.counts["skipped"] == 14


def numpy_of(tensor):
    return tensor.detach().numpy()


class Scaled(nn.Module):
    """Divides by what falls from call to call, as a temperature that is annealed."""

    def __init__(self, zero_at=20):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.calls = 0
        self.zero_at = zero_at
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.fc(x) / (max(self.zero_at - self.calls, 0) / self.zero_at)  # here


class Annealed:
    """A factor that rises to 1, like the factor of a KL term."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return min(self.calls / 20, 1)


class Normed(nn.Module):
    """Has what a forward changes: running statistics, what is no buffer, an object of its own, random numbers."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.average = torch.zeros(8)
        self.recent = deque(maxlen=5)
        self.factor = Annealed()
        self.calls = 0

    def forward(self, x):
        h = self.drop(self.norm(self.fc(x)))
        finite = h.detach().float().nan_to_num(0.0, 0.0, 0.0)
        self.average.mul_(0.9).add_(finite.mean(0), alpha=0.1)
        self.recent.append(finite.abs().max().item())
        self.calls += 1
        large = 1e9 if self.calls % 7 == 0 else 1
        return h * (1 + self.average) * self.factor() / (1 + sum(self.recent) / len(self.recent)) * large


@pytest.mark.parametrize("make", [Scaled, Normed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("scale", ["dynamic", 1.0])
def test_the_run_stays_what_it_would_have_been(make, scale, capsys):
    """Some first steps are skipped, and some losses are not finite."""

    def losses(is_explained):
        torch.manual_seed(0)
        model, optimizer = initialized(make(), "O1", lr=1e-2, loss_scale=scale)
        if is_explained:
            explain_overflows()
        seen = []
        for step in range(30):
            optimizer.zero_grad()
            loss = model(WORDS * (1 if step else 1e9)).float().pow(2).mean() * 50
            make_step(optimizer, loss)
            seen.append(loss.item())
        reset()
        return torch.tensor(seen), vars(model).get("seen"), model.calls

    explained, plain = losses(True), losses(False)
    if scale == "dynamic":
        assert torch.isfinite(plain[0]).sum() > 15
    torch.testing.assert_close(explained[0], plain[0], rtol=0, atol=0, equal_nan=True)
    assert explained[1:] == plain[1:]


def test_what_falls_from_call_to_call_is_found_where_it_is_zero(capsys):
    """Steps that are skipped before take no call from it."""
    model, optimizer = started(Scaled())
    for _ in range(24):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().pow(2).mean() * 50)
    seen = told(capsys)
    assert (seen.last["step"], seen.lines[-1][-6:]) == (20, "# here")


def test_a_forward_that_went_otherwise_is_not_reported(capsys):
    """Run again, it is the next call: its result is another."""
    model, optimizer = started(Scaled(zero_at=7), loss_scale=1.0)
    for step in range(5):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().mean() * (float("inf") if step == 4 else 1))
    seen = told(capsys)
    assert (len(seen.unknown), seen.faults) == (1, [])


def test_a_backward_that_is_not_finite_now_and_then(capsys):
    """At a scale at which steps were made, such a skip is looked into: by the watch."""
    model, optimizer = started(nn.Linear(8, 8))
    for step in range(40):
        optimizer.zero_grad()
        y = model(WORDS).float() * (0 if step % 11 == 10 else 1)
        make_step(optimizer, y.pow(2).sum(1).sqrt().mean() * 1e-2)  # here
    seen = told(capsys)
    assert seen.lines[-1].endswith("# here")
    assert seen.counts["skipped"] == 3


def test_a_gradient_beyond_float16_at_any_scale_is_a_fault_though_the_scale_falls(capsys):
    """The class weight of a rare class: each fifth step is skipped, and so few skips are normal otherwise."""
    model, optimizer = started(nn.Linear(8, 8), min_loss_scale=1)
    for step in range(40):
        optimizer.zero_grad()
        weight = 5e8 if step % 5 == 4 else 1.0
        make_step(optimizer, (model(WORDS).float() * weight).mean())  # here
    seen = told(capsys)
    assert seen.last["see"] == ["gradient"]
    assert seen.last["from"].endswith("# here")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_overflow_are_no_argument_of_what_the_script_does_to_their_sum(level, capsys):
    """Micro-batches are summed by amp, and the sum is clipped: the scale comes down, and that is all."""
    model, optimizer = started(nn.Linear(8, 8), level)
    for step in range(32):
        optimizer.zero_grad()
        for part in range(4):
            y = model(WORDS).float()
            with amp.scale_loss(
                y.mean() * (4e4 if (step, part) in ((20, 0), (24, 0), (28, 1)) else 1.0), optimizer
            ) as scaled:
                scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    seen = told(capsys)
    assert (seen.faults, seen.unknown) == ([], [])


def test_blocks_without_a_step_are_counted(capsys):
    model, optimizer = started(nn.Linear(8, 8))
    with amp.scale_loss(model(WORDS).float().mean(), optimizer) as scaled:
        scaled.backward()
    counts = told(capsys).counts
    assert (counts["steps"], counts["blocks"]) == (0, 1)


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_state_that_the_optimizer_itself_spoils(capsys, level):
    """Its trust ratio is 0 / 0 for a weight and a gradient of 0."""

    class Lars(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad * (p.detach().norm() / p.grad.norm()))
                    p.data.sub_(momentum, alpha=group["lr"])

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model.gate = nn.Parameter(torch.zeros(8))
    model, optimizer = amp.initialize(model, Lars(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    explain()
    for _ in range(4):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().pow(2).mean() + (model.gate * 0).sum())
    assert told(capsys).first["see"][-1] == "step"


class SafeLog(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log(x.float().clamp(min=1e-3))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad / x.float()).to(x.dtype)


@pytest.mark.parametrize("scale", ["dynamic", 2.0**16])
def test_what_a_mask_takes_from_the_gradients_is_no_cause(scale, capsys):
    """The backward of a ReLU leaves out where its result is 0, and there the division is by 0."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x):
            return self.b(SafeLog.apply(torch.relu(self.a(x))))

    model, optimizer = started(Net(), loss_scale=scale)
    for step in range(30):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        make_step(optimizer, model(x).float().pow(2).mean() * 0.1)
    seen = told(capsys)
    if scale == "dynamic":
        assert (seen.faults, seen.unknown) == ([], [])
    else:
        assert seen.last["function"] == "linear"
        assert seen.last["see"] == ["gradient"]


def test_the_scale_is_told_from_where_to_where(capsys):
    model, optimizer = started(nn.Linear(8, 8), "O2")
    for _ in range(20):
        optimizer.zero_grad()
        make_step(optimizer, (model(WORDS).float() * 300).sum())
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    assert told(capsys).counts["scales"] == {"": [65536.0, scale]}


@pytest.mark.filterwarnings("ignore:optimizer.step\\(\\) with gradients, but no scale_loss block:UserWarning")
def test_what_amp_has_warned_of_is_told(capsys):
    model, optimizer = started(nn.Linear(8, 8), "O2")
    for _ in range(6):
        optimizer.zero_grad()
        model(WORDS).float().mean().backward()
        optimizer.step()
    assert told(capsys).counts["warned"] == ["steps with gradients of a backward() outside of scale_loss"]


def test_a_fault_that_comes_while_another_persists_has_its_own_steps(capsys):
    model, optimizer = started(nn.Linear(8, 8), "O2")
    for step in range(60):
        optimizer.zero_grad()
        y = model(WORDS).float()
        if step < 25:
            loss = (y * 1e7).sum()
        else:
            loss = (y * 0).pow(2).sum(1).sqrt().mean()  # here
        make_step(optimizer, loss)
    seen = told(capsys)
    assert [fault["see"][-1] for fault in seen.faults] == ["gradient", "sqrt, norm"]
    assert seen.lines[1].endswith("# here")
    assert seen.counts["lost"] == {"gradients": 60}


def test_a_gradient_that_the_script_spoils_in_a_watched_step_has_its_line(capsys):
    """A loss that was lost before has begun the watch."""
    model, optimizer = started(nn.Linear(8, 8))
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = model(WORDS).float().pow(2).mean()
        if step == 2:
            loss = torch.log(loss * 0)
        with amp.scale_loss(loss * float(step != 4), optimizer) as scaled:
            scaled.backward()
        if step == 4:
            model.weight.grad.div_(model.weight.grad.norm())  # here
        optimizer.step()
    seen = told(capsys)
    assert (seen.last["step"], seen.last["op"]) == (4, "div_")
    assert seen.lines[-1].endswith("# here")


class Blow(nn.Module):
    factor = 1.0

    def forward(self, x):
        return (x * self.factor).exp()


def test_a_line_that_layers_share_is_one_fault(capsys):
    """Each layer has its turn: three explanations of one line would leave none for another fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Blow(), nn.Linear(4, 4), Blow(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    explain()
    for step in range(40):
        for place in (1, 3):
            model[place].factor = 1e4 if step in (20 + place, 30 + place) else 1.0
        optimizer.zero_grad()
        make_step(optimizer, model(torch.ones(4, 4)).float().mean())
    seen = told(capsys)
    assert [fault["op"] for fault in seen.faults] == ["exp"]
    assert list(seen.counts["told"].values()) == [4]


class Encoder(nn.Module):
    """A transformer's layer that ignores what pads its input, as torch does: with a mask of -inf."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 20)

    def forward(self, x):
        return self.out(self.layer(self.embed(x), src_key_padding_mask=x == 0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_mask_of_minus_inf_is_not_to_blame_for_a_gradient_that_came_in(level, capsys):
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    explain()
    for step in range(22):
        x = torch.randint(1, 20, (4, 6))
        x[:, 4:] = 0
        p = model(x).float().softmax(-1)
        p = torch.where((x == 0)[..., None], p * 0.0, p) if step % 10 == 9 else p
        loss = torch.where((x == 0)[..., None], 0.0, torch.log(p)).mean()
        optimizer.zero_grad()
        make_step(optimizer, loss)
    assert {fault["function"] for fault in told(capsys).faults} == {"log"}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scores_that_overflow_under_a_causal_mask_of_minus_inf(level, capsys):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            mask = torch.full((6, 6), -torch.inf).triu(1).to(x.dtype)
            scores = torch.matmul(self.q(x) * 300, self.k(x).transpose(-1, -2) * 300) + mask
            return scores.softmax(-1) @ self.v(x)

    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    explain()
    for _ in range(5):
        optimizer.zero_grad()
        make_step(optimizer, model(torch.randn(4, 6, 8)).float().pow(2).mean())
    assert told(capsys).first["function"] == "matmul"


def test_gradients_that_are_kept_from_each_step_are_told_of(capsys):
    """As where zero_grad() stands in the branch that steps: the first overflow stays for ever."""
    model, optimizer = started(nn.Linear(8, 8))
    for _ in range(30):
        with amp.scale_loss(model(WORDS).float().sum() * 1e3, optimizer) as scaled:
            scaled.backward()
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
            optimizer.zero_grad()
    counts = told(capsys).counts
    assert (counts["steps"], counts["blocks"]) == (0, 30)
    assert counts["at_end"] == ["gradients are not finite, and were not cleared"]


def test_a_run_that_stops_to_step_is_told_so(capsys):
    """As where the script's own average of gradient norms has become infinite."""
    model, optimizer = started(nn.Linear(8, 8))
    for step in range(40):
        optimizer.zero_grad()
        with amp.scale_loss(model(WORDS).float().mean(), optimizer) as scaled:
            scaled.backward()
        if step < 5:
            optimizer.step()
    counts = told(capsys).counts
    assert (counts["steps"], counts["skipped"], counts["blocks_since"]) == (5, 0, 35)


def test_a_batch_that_the_script_drops_is_not_counted(capsys):
    model, optimizer = started(nn.Linear(8, 8))
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        loss = model(WORDS).float().mean() * (torch.nan if step == 2 else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if torch.isfinite(loss):
            optimizer.step()
    counts = told(capsys).counts
    assert (counts["steps"], counts["lost"]) == (5, {})


def test_a_script_that_explain_ends_has_no_verdict_on_its_steps(capsys):
    torch.manual_seed(0)
    model, optimizer = initialized(nn.Linear(8, 8), "O1")
    explain_overflows(limit=1, stop=True)
    with pytest.raises(SystemExit), amp.scale_loss(model(WORDS * torch.inf).float().mean(), optimizer) as scaled:
        scaled.backward()
    assert last_words() == []


def test_an_exponential_that_is_clamped_ends_nothing(capsys):
    """It is infinite before the clamp, and a gradient behind it overflows at a static scale."""

    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return (x * 12).exp().clamp(max=1e4) * self.weight

    model, optimizer = started(Clamped(), "O2", loss_scale=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        make_step(optimizer, (model(torch.ones(4, 8)).float() * 20).sum())
    assert told(capsys).faults


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no floats of 8 bits")
def test_floats_of_8_bits_are_not_looked_at(capsys):
    """Torch has no maximum of them."""

    class Quantized(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.to(torch.float8_e4m3fn).to(y.dtype) * 1e5

    layer = Quantized(8, 8)
    layer.register_buffer("quantized", torch.ones(8).to(torch.float8_e4m3fn))
    model, optimizer = started(layer)
    for _ in range(8):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).float().sum() * 1e3)
    assert last_words()


class Codebook(nn.Module):
    """Centers that follow what is nearest, as in a VQ-VAE: those that are near to nothing are divided by next to 0."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("count", torch.full((16,), 1e-6))
        self.register_buffer("centers", torch.ones(16, 8).cumsum(0))

    def forward(self, x):
        h = self.fc(x)
        nearest = torch.cdist(h.float(), self.centers.float()).argmin(-1)
        quantized = self.centers[nearest]
        self.centers.data.copy_(self.centers.new_ones(16, 8) / self.count[:, None])  # here
        return (h - quantized).float()


def test_what_writes_a_buffer_is_found(capsys):
    model, optimizer = started(Codebook(), "O2")
    for _ in range(6):
        optimizer.zero_grad()
        make_step(optimizer, (model(WORDS) * 1e-2).pow(2).mean())
    seen = told(capsys)
    assert [fault["kind"] for fault in seen.faults] == ["buffer", "op"]
    assert seen.lines[1].endswith("# here")


def test_where_no_more_is_run_again_a_known_cause_is_enough(capsys, monkeypatch):
    monkeypatch.setattr("ampcompat.tools.explain.again.MOST_RUN_AGAIN", 3)
    model, optimizer = started(nn.Sequential(nn.Linear(8, 8), Log()))
    for _ in range(8):
        optimizer.zero_grad()
        make_step(optimizer, model(WORDS).mean())
    seen = told(capsys)
    assert [fault["op"] for fault in seen.faults] == ["log"]
    assert seen.counts["lost"] == {"loss": 8}


class Log(nn.Module):
    """The logarithm of what is 0."""

    def forward(self, x):
        return torch.log(x.float() * 0)


class LossInside(nn.Module):
    """Whose forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return (self.fc(x) * 1e3).pow(2).sum()  # here


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_script_whose_own_test_of_the_loss_fails_at_each_batch(is_lost, capsys):
    """No block is begun, and so amp is not asked; a script that only infers has none either."""
    model, _ = started(LossInside(), "O2")
    for _ in range(4):
        loss = model(WORDS * is_lost)
        assert bool(torch.isfinite(loss)) != is_lost
    seen = told(capsys)
    if is_lost:
        assert (seen.counts["op"], seen.counts["source"][-6:]) == ("pow", "# here")
    else:
        assert seen.counts == {}


def test_a_mask_that_an_inference_returns_is_no_fault():
    class Policy(LossInside):
        def forward(self, x):
            return self.fc(x).masked_fill(x > 0, -torch.inf)

    model, _ = started(Policy(), "O2")
    assert torch.isinf(model(WORDS)).any()
    assert last_words() == []
