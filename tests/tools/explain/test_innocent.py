"""What stands beside a fault and looks like its cause: a warning, a mask, an eps, a weight that grew, another line."""

import pytest
import torch
import torch.nn.functional as F
from amp_training import last_words
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows

pytestmark = pytest.mark.on_cpu
STEPS = 30
#: The steps whose batch is an outlier, a short one, or damaged.
SELDOM = range(9, STEPS, 10)


class Net(nn.Module):
    """Two layers, and what is between them."""

    def __init__(self, between, outputs=4):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(8, 16), nn.Linear(16, outputs), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def explained(capsys, model, level, loss, batch=lambda step: torch.randn(16, 8), after=lambda model: None, **options):
    """What is told of a run, and its verdict."""
    torch.manual_seed(0)
    explain_overflows()
    rate = options.pop("lr", 1e-3)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), rate), opt_level=level, verbosity=0, **options
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        with amp.scale_loss(loss(model, batch(step)), optimizer) as scaled:
            scaled.backward()
        after(model)
        optimizer.step()
    verdict = last_words()[-1].text()
    return capsys.readouterr().err, verdict


def cross_entropy(model, x):
    return F.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long))


def with_outliers(step):
    return torch.randn(16, 8) * (3000 if step in SELDOM else 1)


@pytest.mark.filterwarnings("ignore:Gradients of the model's half parameters changed:UserWarning")
def test_a_clip_that_has_no_effect_makes_nothing_too_large(capsys):
    told, verdict = explained(
        capsys,
        Net(torch.square),
        "O2",
        cross_entropy,
        with_outliers,
        after=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )
    assert "square left the range of float16" in told.replace(" (aten::pow)", "")
    assert "clip" not in told
    assert "test_innocent.py:26 (square" in verdict
    assert "amp has warned of gradients of the model's half parameters that the script wrote" in verdict


@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom:UserWarning")
def test_a_mask_that_the_model_returns_is_not_why_the_loss_is_nan(capsys):
    """Illegal actions have -inf; an advantage has no standard deviation where it stands alone."""

    class Policy(Net):
        def forward(self, x):
            legal = torch.arange(4) < 3
            return super().forward(x).masked_fill(~legal, -torch.inf)

    def loss(model, x):
        advantage = x.sum(1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return -(F.log_softmax(model(x), -1)[:, 0] * advantage).mean()

    def batch(step):
        return torch.randn(1 if step in SELDOM else 16, 8)

    told, verdict = explained(capsys, Policy(F.relu), "O1", loss, batch)
    assert "masked_fill" not in told + verdict
    assert "std of a single value is NaN" in told


def test_a_mask_is_not_why_what_stands_beside_it_becomes_too_large(capsys):
    """A temperature that is annealed without an end divides what is not masked, too."""
    temperature = iter(0.5**step for step in range(100))

    def codes(y):
        masked = y.masked_fill(torch.arange(4) == 3, -torch.inf)
        return F.softmax(masked / next(temperature), -1)

    class Codes(Net):
        def forward(self, x):
            return codes(super().forward(x))

    told, verdict = explained(capsys, Codes(F.relu), "O1", lambda model, x: model(x).pow(2).mean())
    assert "masked_fill" not in told.replace("masked_fill(torch", "") + verdict
    assert "div left the range of float16" in told.replace("truediv (aten::div)", "div")


def test_a_mask_is_why_the_loss_of_a_forbidden_action_is_infinite(capsys):
    def loss(model, x):
        logits = model(x)
        return F.cross_entropy(logits, torch.full((len(x),), 3 if x[0, 0] > 1.5 else 0))

    class Policy(Net):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.arange(4) == 3, -torch.inf)

    def batch(step):
        x = torch.randn(16, 8).clamp(-1, 1)
        x[0, 0] = 2.0 if step == 20 else 0.0
        return x

    told, _ = explained(capsys, Policy(F.relu), "O1", loss, batch)
    assert "The loss of step 21 is inf." in told
    assert "masked_fill" in told


def test_a_count_of_nothing_is_at_least_one(capsys):
    told, _ = explained(capsys, Net(F.relu), "O1", lambda model, x: model(x).sum() / (x > 100).sum())
    assert ".clamp_min(1) on the denominator" in told


def test_an_eps_is_not_why_a_power_is_too_large(capsys):
    """GeM's pooling clamps at an eps that is 0 in float16."""

    def gem(h):
        return h.clamp(min=1e-8).pow(3).mul(1e-3)

    told, _ = explained(capsys, Net(gem), "O2", cross_entropy, lambda step: torch.randn(16, 8) * 300)
    assert "(aten::pow)" in told or "aten::pow left" in told
    assert "eps" not in told


def test_an_eps_in_the_numerator_is_not_why_a_quotient_is_infinite(capsys):
    def loss(model, x):
        price = x[:, :1].abs().half()
        price[0] = 0
        return (((model(x) - x[:, 1:2]).half() + 1e-8) / price).abs().mean()

    told, _ = explained(capsys, Net(F.relu, 1), "O2", loss)
    assert "a division by zero (1 zero)" in told
    assert "1e-08" not in told


def test_a_square_is_no_division(capsys):
    told, _ = explained(
        capsys,
        Net(F.relu),
        "O4",
        lambda model, x: (F.relu(model(x)).float() ** 2).mean(),
        lambda step: torch.randn(16, 8) * (1e25 if step in SELDOM else 1),
        loss_scale="dynamic",
    )
    assert "division" not in told
    assert "aten::pow" in told


def test_a_weight_that_grew_behind_it_is_not_why_a_value_is_too_large(capsys):
    """A bias learns the mean of the targets, as it should."""
    told, verdict = explained(
        capsys,
        Net(lambda h: F.layer_norm(h.square(), (16,)), 1),
        "O2",
        lambda model, x: (model(x).float() - 100).pow(2).mean(),
        lambda step: torch.randn(16, 8) * (3000 if step == 9 else 1),
        lr=0.01,
        loss_scale=16.0,
    )
    assert "square" in told
    assert "grow" not in told + verdict


def test_the_input_is_not_why_a_buffer_is_too_large(capsys):
    class Camera(Net):
        def __init__(self):
            super().__init__(F.relu, 1)
            self.register_buffer("projection", 1e5 * torch.eye(8))

        def forward(self, x):
            return super().forward(x @ self.projection / 1e5)

    told, _ = explained(capsys, Camera(), "O1", lambda model, x: model(x).pow(2).mean())
    assert "hint      smaller numbers in buffer projection of Camera: it reaches 1e+05" in told


def test_no_row_is_said_to_be_masked_where_none_is(capsys):
    def loss(model, x):
        logits = model(x).masked_fill(torch.arange(4) == 3, -torch.inf)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), label_smoothing=0.1)

    told, _ = explained(capsys, Net(F.relu), "O1", loss)
    assert "write -1e4 in place of -inf" in told
    assert "everything is masked" not in told


def test_a_line_whose_infinities_are_replaced_has_not_the_same_fault(capsys):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            gate = self.gate(x)
            gate = gate * gate
            gate = torch.where(gate > 100, torch.zeros_like(gate), gate)
            body = self.body(x)
            return self.head(gate + body * body)

    told, _ = explained(capsys, Gated(), "O2", cross_entropy, lambda step: torch.randn(16, 8) * 600)
    assert "body * body" in told
    assert "also" not in told
