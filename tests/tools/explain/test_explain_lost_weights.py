"""What steps do to weights and to the optimizer's state: named, with a hint."""

import re

import pytest
import torch
from amp_training import last_words, make_step
from lossy_steps import Words, adam, train
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows


def test_adams_eps_at_o3(capsys):
    """The commonest failure of O3: rows without a gradient become 0 / 0."""
    train(adam())
    out, err = capsys.readouterr()
    assert "ampcompat explain" not in out
    assert "Step 1 of Adam left a weight" in err
    assert "what      embeddings.weight (float16): 32 of 40 elements" in err
    assert "where     group 0 of Adam" in err
    assert "eps=1e-08 is 0 in float16, and exp_avg_sq is 0 in 32 of these 32" in err
    assert "hint      pass eps=1e-4 to Adam" in err
    assert "or        opt_level='O2'" in err


def test_adams_eps_in_a_model_with_other_weights(capsys):
    """Weights beside the first grow to infinity too: by the same division, and not by the learning rate."""

    def model():
        return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 4))

    train(adam(lr=0.01), model=model, steps=1, loss=lambda y: y.float().mean() * 1e-3)
    told = capsys.readouterr().err
    assert "  hint      pass eps=1e-4 to Adam" in told
    assert "growth" not in told


@pytest.mark.parametrize(("level", "options"), [("O3", {"eps": 1e-4}), ("O2", {}), ("O1", {}), ("O0", {})])
def test_the_hints_help(capsys, level, options):
    model, _ = train(adam(**options), level, loss=lambda y: y.float().sum() * 0.1)
    assert all(p.isfinite().all() for p in model.parameters())
    assert "ampcompat explain" not in capsys.readouterr().err


def test_an_update_that_leaves_float16(capsys):
    train(lambda p: torch.optim.SGD(p, lr=6e4), steps=1, model=lambda: nn.Linear(2, 2), batch=torch.full((1, 2), 4.0))
    err = capsys.readouterr().err
    assert "Step 1 of SGD left a weight that is not finite." in err
    assert "what      weight (float16): 4 of 4 elements are not finite" in err
    assert "why       the update left the range of float16 (lr=60000, its largest gradient is 4)" in err


def test_state_that_leaves_float16(capsys):
    loss = lambda y: y.float().sum() * 1e4  # noqa: E731 - its square, times 1 - beta2, is beyond 65504
    train(adam(eps=1e-4), steps=1, model=lambda: nn.Linear(2, 2), batch=torch.ones(1, 2), loss=loss)
    err = capsys.readouterr().err
    assert "Step 1 of Adam left state that is not finite." in err
    assert "what      exp_avg_sq of weight (float16): 4 of 4 elements are not finite" in err
    assert "the largest gradient is 1e+04, whose square is 1e+08" in err


def test_the_step_is_numbered_and_the_group_named(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    amp.explain_overflows()
    for step in range(4):
        optimizer.param_groups[1]["lr"] = 6e4 if step == 2 else 0.0
        make_step(optimizer, model(torch.full((1, 2), 9.0)).float().sum())
        optimizer.zero_grad()
    err = capsys.readouterr().err
    assert "Step 3 of SGD left a weight that is not finite." in err
    assert "where     group 1 of SGD" in err
    assert re.search(r"what      1\.(weight|bias) \(float16\)", err)
    assert err.count("ampcompat explain: ") == 1


def test_a_master_beyond_float16_at_o2(capsys):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    loss = lambda y: (y.float() + 1).pow(2).mean() / 4  # noqa: E731 - gradients are 1 / 4
    train(lambda p: torch.optim.SGD(p, lr=4e5), "O2", 3, lambda: model, torch.ones(1, 2), loss)
    err = capsys.readouterr().err
    assert "Step 1 of SGD left a weight that is not finite." in err
    assert "what      weight (float16): 4 of 4 elements are not finite" in err
    assert "why       its float32 master reached 100000, and float16 ends at 65504" in err
    assert err.count("ampcompat explain: ") == 1  # the skipped steps that follow are its doing


@pytest.mark.parametrize(("level", "rate"), [("O1", 1e38), ("O2", 1e6)])
def test_the_step_is_the_one_that_wrote_it_whenever_it_is_read(capsys, level, rate):
    """Row 3 is written by step 2, and read first in step 5, after an overflow of another kind."""

    class Boosted(Words):
        boost = 1e9

        def forward(self, x):
            return self.fc(self.embeddings(x) * self.boost)

    torch.manual_seed(0)
    model = Boosted()
    parts = [{"params": model.embeddings.parameters()}, {"params": model.fc.parameters()}]
    model, optimizer = amp.initialize(model, torch.optim.SGD(parts, lr=1e-3), opt_level=level, verbosity=0)
    amp.explain_overflows()
    for step, word in enumerate((1, 3, 1, 1, 3), start=1):
        optimizer.param_groups[0]["lr"] = rate if step == 2 else 1e-3
        with amp.scale_loss(model(torch.tensor([word])).float().sum() * 1e-2, optimizer) as scaled:
            scaled.backward()
        if step == 2:
            for p in amp.master_params(optimizer):
                p.grad = p.grad.sign() * 10
        optimizer.step()
        optimizer.zero_grad()
        model.boost = 1.0
    overflow, written = capsys.readouterr().err.split("ampcompat explain: ")[1:]
    assert overflow.startswith("The loss of step 1 is ")
    assert written.startswith("Step 2 of SGD left a weight that is not finite.\n  what      embeddings.weight (float")
    assert "4 of 40 elements are not finite" in written


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_gradient_that_the_script_wrote_after_the_block(capsys, level, fused):
    """The block's own gradients were finite; with a fused optimizer only the device knows that the step was made."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused or None)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.explain_overflows()
    for step in (1, 2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        if step == 2:
            next(iter(amp.master_params(optimizer))).grad[0, 1] = float("nan")
        optimizer.step()
    written = capsys.readouterr().err.split("ampcompat explain: ")[-1]
    dtype = "float16" if level == "O3" else "float32"
    assert written.startswith("Step 2 of SGD left a weight")
    assert f"what      weight ({dtype}): 1 of 4 elements" in written
    assert "why       its gradient was not finite" in written
    assert "hint      look at what writes gradients outside scale_loss" in written


@pytest.mark.parametrize("read", [True, False])
def test_a_weight_that_no_step_wrote(capsys, read):
    """Whether the loss overflows for it or not, the next step is not to blame."""
    model, loss = lambda: nn.Linear(2, 2), lambda y: y.float().square().mean() * 0.01
    model, optimizer = train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 2, model, torch.ones(1, 2), loss)
    with torch.no_grad():
        model.bias[0] = float("inf")
    make_step(optimizer, loss(model(torch.ones(1, 2))[:, 0 if read else 1]))
    err = capsys.readouterr().err
    if read:
        assert "parameter bias was not finite before the forward" in err
        assert "hint      no step is known to have written it" in err
    else:
        assert err == ""


def test_a_weight_that_was_known_to_be_lost_is_no_later_steps_fault(capsys):
    """The script has written it through ``data``, which no version tells, and not each batch reads it."""
    model = nn.Embedding(4, 2)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0, loss_scale="dynamic"
    )
    explain_overflows()
    for step in range(12):
        if step == 4:
            model.weight.data[0] = float("nan")
        optimizer.zero_grad()
        make_step(optimizer, model(torch.tensor([step % 2, 2])).sum() * 1e-2)
    told = capsys.readouterr().err
    assert told.count("ampcompat explain: ") == 1
    assert "parameter weight was not finite before the forward" in told
    verdict = last_words()[-1].head
    assert verdict.startswith("4 of 12 steps had a loss, a gradient or a weight that is not finite; the cause is")
    assert "parameter weight of Embedding" in verdict


def test_a_fault_after_good_weights_were_loaded_is_explained_too(capsys):
    """A script that goes back to its last checkpoint when the loss is NaN."""

    class Spoils(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if step == 1:
                return torch.log(y * 0)
            return torch.acos(y * 0 + 2) if step == 4 else y

    model = Spoils(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    explain_overflows()
    good = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().mean()
        make_step(optimizer, loss)
        if not torch.isfinite(loss):
            model.load_state_dict(good)
    told = capsys.readouterr().err
    assert "torch.log(y * 0)" in told
    assert "torch.acos(y * 0 + 2)" in told
    assert [one["steps"] for one in last_words()[-1].content["causes"]] == [1, 1]


def test_infinities_before_the_first_step_are_ignored(capsys):
    """A mask of ``-inf`` is a parameter of the model."""

    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.mask = nn.Parameter(torch.tensor([0.0, 0.0, float("-inf")]))

        def forward(self, x):
            return (super().forward(x) + self.mask).softmax(-1)[:, :2]

    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 3, Masked, torch.ones(1, 3), lambda y: y.square().sum() * 1e-3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_weights_that_were_never_stepped(capsys, level):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    train(lambda p: torch.optim.SGD(p, lr=0.1), level, 3, lambda: model, torch.ones(1, 2))
    err = capsys.readouterr().err
    assert err.count("ampcompat explain: ") == 1
    assert "parameter weight was not finite before the forward" in err
    assert "no step was made yet: look at how the model is initialized, or at the checkpoint" in err


def test_a_learning_rate_that_is_not_finite_is_named(capsys):
    train(lambda p: torch.optim.SGD(p, lr=float("inf")), "O1", 1, loss=lambda y: y.float().mean())
    err = capsys.readouterr().err
    assert "why       its learning rate was inf" in err
    assert "hint      look at what sets it, such as a scheduler that divides by zero" in err
