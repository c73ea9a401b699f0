"""What scripts write to weights lasts, whenever they first do it: ordinary idioms, at O2 and O5 as at O0.

Writes through tensors that ``p.data`` gave out are in ``test_written_data.py``.

Every number here is exact in both halves, so the levels agree to the bit.
"""

import copy

import pytest
import torch
from counting import Counter, counted
from known_gradients import STEPS, Run, Scores
from nets import MASTER_LEVELS

from ampcompat import amp

FIRST = [0, 2, 6]  # the step at which a script writes for the first time


def trained(level, write, first, **options):
    run = Run(level, **options)
    for index in range(STEPS):
        if index >= first:
            write(run, index)
        run.step()
    return run.weights()


# -- what scripts write ------------------------------------------------------------------------------------------------
def federated_averaging(run, index):
    """Rounds of averaging with another worker's weights."""
    if index % 2 == 0:
        other = Scores(seed=index)
        for param, theirs in zip(run.model.parameters(), other.parameters(), strict=True):
            param.data = ((param.data.float() + theirs.data) / 2).mul(32).round().div(32).to(param.dtype)


def population_training(run, index):
    """A worker that does badly takes over a better one's weights."""
    if index % 3 == 0:
        better = Scores(seed=index)
        for param, theirs in zip(run.model.parameters(), better.parameters(), strict=True):
            param.data.copy_(theirs.data)


def new_head(run, index):
    if index % 4 == 2:
        run.model.head.weight.data.fill_(0.25)
        run.model.head.bias.data.zero_()


def new_head_by_init(run, index):
    if index % 4 == 2:
        torch.nn.init.constant_(run.model.head.weight, 0.25)
        torch.nn.init.zeros_(run.model.head.bias)


def revived_codes(run, index):
    """Entries of a codebook that nothing uses are put where data is."""
    run.model.codebook.weight.data[2 + index % 2] = torch.tensor([0.5, -0.25, 0.125, index / 8])


def pruning_mask(run, index):
    mask = torch.ones(2, 4)
    mask[:, index % 4] = 0
    run.model.head.weight.data.mul_(mask.to(run.model.head.weight.dtype))


def weight_decay_by_hand(run, index):
    for param in run.model.parameters():
        param.data.add_(param.data.sign(), alpha=-(2.0**-6))


def clipping_that_bites_late(run, index):
    for param in run.model.parameters():
        param.data.clamp_(-0.25, 0.25)


def clipped_masters(run, index):
    for param in amp.master_params(run.optimizer):
        param.data.clamp_(-0.25, 0.25)


def clipped_groups(run, index):
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            param.data.clamp_(-0.25, 0.25)


def average_put_in_and_out_again(run, index):
    """``torch_ema``, and SWA's swap: over the masters, for an evaluation."""
    params = list(amp.master_params(run.optimizer))
    stored = [param.clone() for param in params]
    for param in params:
        param.data.copy_(torch.full_like(param, index / 8))
    output = run.model(torch.ones(()))
    assert output.float() == index / 8 * (8 + 2 + 8)
    for param, old in zip(params, stored, strict=True):
        param.data.copy_(old)


def average_put_in_for_good(run, index):
    if index % 3 == 2:
        for param in amp.master_params(run.optimizer):
            param.data.copy_(torch.full_like(param, index / 8))


def logged_and_clipped(run, index):
    """To look at the model's weights is not a write, and undoes none of the masters'."""
    for param in amp.master_params(run.optimizer):
        param.data.clamp_(-0.25, 0.25)
    assert all(param.data.abs().max() <= 0.25 for param in run.model.parameters())


def vectors(run, index):
    vector = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector.clamp(-0.25, 0.25), run.model.parameters())


IDIOMS = (federated_averaging, population_training, new_head, new_head_by_init, revived_codes, pruning_mask)
IDIOMS += (weight_decay_by_hand, clipping_that_bites_late, clipped_masters, clipped_groups)
IDIOMS += (average_put_in_and_out_again, average_put_in_for_good, logged_and_clipped, vectors)


@pytest.mark.cover(2)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("write", IDIOMS)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_write_lasts_as_at_o0(level, write, first):
    want = trained("O0", write, first)
    got = trained(level, write, first)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_attack_on_weights_leaves_their_masters_alone(level, first):
    """FGM: the embedding is moved for a second backward pass, and put back before the step."""

    def attack(run, index):
        weight = run.model.codebook.weight
        backup = weight.data.clone()
        weight.data.add_(0.125)
        run.model(torch.ones(()))
        weight.data = backup

    run, plain = (Run(level, torch.optim.Adam) for _ in range(2))
    for index in range(STEPS):
        if index >= first:
            attack(run, index)
        run.step()
        plain.step()
    for name, value in plain.weights().items():
        assert torch.equal(run.weights()[name], value), name


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_was_not_written_keeps_its_low_bits(level, first):
    run = Run(level, torch.optim.Adam)
    for index in range(STEPS):
        before = run.weights()["codebook.weight"]
        if index >= first:
            run.model.codebook.weight.data[3] = 0.375
            after = run.weights()["codebook.weight"]
            assert torch.equal(after[:3], before[:3])
            assert (after[3] == 0.375).all()
        run.step()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_state_dict_that_is_kept_costs_forwards_nothing(level):
    """The idiom of early stopping: the best weights so far are kept, and training goes on."""

    def forward():
        run.model(torch.ones(()))

    run = Run(level)
    run.step()
    plain = counted(forward)
    kept = [run.model.state_dict()]
    forward()  # rounds it into the model, once
    for _ in range(3):
        assert counted(forward) == plain
        run.step()
    run.model.eval()
    kept.append(run.model.state_dict())
    forward()
    assert counted(forward) == plain
    kept[0]["head.weight"].fill_(0.5)
    assert counted(forward)["ops"] > plain["ops"]
    assert (run.model.head.weight == 0.5).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_no_write_costs_a_host_sync(level):
    """A moving average over ``state_dict()`` and the first step cost none either."""
    run = Run(level)
    average = copy.deepcopy(run.model)
    with Counter() as counter:
        for index in range(4):
            for write in (clipping_that_bites_late, clipped_masters, new_head_by_init):
                write(run, index)
            run.step()
            for mean, value in zip(average.state_dict().values(), run.model.state_dict().values(), strict=True):
                mean.mul_(0.5).add_(value, alpha=0.5)
            average(torch.ones(()))
    assert counter.syncs == 0


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_parameters_are_what_torch_makes(level):
    """Torch's optimizers choose their fused passes by ``type(p)``; ``Parameter(p)`` takes no other class."""
    run = Run(level)
    for param in (*run.model.parameters(), *amp.master_params(run.optimizer)):
        assert type(param) is torch.nn.Parameter
        assert torch.nn.Parameter(param).data_ptr() == param.data_ptr()


class OwnParameter(torch.nn.Parameter):
    """A class of the script's own."""


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_parameters_of_a_class_of_the_scripts_own(level):
    model = torch.nn.Linear(4, 2, bias=False)
    model.weight = OwnParameter(torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.weight.data.fill_(0.25)
    assert type(model.weight) is OwnParameter
    assert (next(amp.master_params(optimizer)) == 0.25).all()


def test_data_is_torch_s_own_again_after_a_reset():
    from internals import reset

    Run("O2")
    assert "data" in vars(torch.nn.Parameter)
    reset()
    assert "data" not in vars(torch.nn.Parameter)
