"""What three habits of scripts cost at O2 beyond the same by hand, in kernels and host syncs, for 100 parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from emulated_cuda import Log
from steady_steps import WARM_UP, residual, under_amp

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.version.cuda != "emulated", reason="needs --emulate-cuda")]
COUNT = 100
CASE = residual(COUNT)


def counted(call):
    with Log() as log:
        call()
    return log


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_first_steps_wait_no_more_than_later_ones(level):
    step = under_amp(level)(CASE)
    syncs = [counted(step).syncs for _ in range(WARM_UP)]
    assert syncs == [syncs[-1]] * WARM_UP


class Training:
    """Steps of a model at O2, and what a script does with its weights after each."""

    def __init__(self):
        model, self.x, self.y = CASE.made()
        self.model, self.optimizer = amp.initialize(
            model, CASE.optimizer_of(model.parameters()), opt_level="O2", verbosity=0
        )

    def step(self, after=lambda: None):
        with amp.scale_loss(F.cross_entropy(self.model(self.x), self.y), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        after()

    def steady(self, after=lambda: None):
        """What a steady step does in a run that calls ``after`` from the first one on."""
        for _ in range(WARM_UP):
            self.step(after)
        return counted(lambda: self.step(after))


def test_weights_clipped_past_the_counters_are_merged_without_a_sync():
    """As WGAN does it: ``p.data.clamp_``, in each step and with effect."""
    training = Training()
    bound = 1e-3 / COUNT

    def clip():
        for param in training.model.parameters():
            param.data.clamp_(-bound, bound)

    assert training.steady(clip).syncs == Training().steady().syncs


def test_an_average_by_state_dict_costs_three_kernels_a_weight_and_no_sync():
    """Two are the script's; the third rounds the average's master into its half weight."""
    training = Training()
    average = copy.deepcopy(training.model)

    def update():
        with torch.no_grad():
            for mean, value in zip(average.state_dict().values(), training.model.state_dict().values(), strict=True):
                mean.mul_(0.9).add_(value, alpha=0.1)

    log, plain = training.steady(update), Training().steady()
    assert log.syncs == plain.syncs
    assert log.kernels <= plain.kernels + 3 * COUNT + 1
