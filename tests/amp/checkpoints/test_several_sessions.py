"""Several sessions, each of one call of ``initialize``: the networks of a GAN, a model and its average, k folds."""

import copy
import functools
import gc
import io
import itertools

import pytest
import torch
from internals import reset
from runs import Net, same
from seeded import seeded

from ampcompat import amp

NAMES = ("discriminator", "generator")
#: What a script does before it trains; the two calls come in the order in which they were made, the scalers after both.
EVENTS = ("discriminator", "generator", "weights", "amp")
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if order.index("discriminator") < order.index("generator") < order.index("amp")
]


class Pair:
    """Two networks, each trained by an optimizer and a session of its own."""

    def __init__(self, level, seed=0):
        torch.manual_seed(seed)
        self.level = level
        self.models = {name: Net() for name in NAMES}
        self.optimizers = {
            name: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for name, model in self.models.items()
        }
        self.steps = 0

    def initialize(self, name):
        amp.initialize(self.models[name], self.optimizers[name], opt_level=self.level, verbosity=0)

    def step(self):
        """One step of each; in the second step the discriminator's loss overflows."""
        for number, name in enumerate(NAMES):
            x = torch.randn(8, 4, generator=seeded(10 * self.steps + number))
            loss = self.models[name](x).float().pow(2).mean()
            if self.steps == 1 and name == "discriminator":
                loss = loss * float("inf")
            self.optimizers[name].zero_grad()
            with amp.scale_loss(loss, self.optimizers[name]) as scaled:
                scaled.backward()
            self.optimizers[name].step()
        self.steps += 1

    def state(self):
        return {
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "amp": amp.state_dict(),
        }

    def load_weights(self, saved):
        for name in NAMES:
            self.models[name].load_state_dict(saved["models"][name])
            self.optimizers[name].load_state_dict(saved["optimizers"][name])


@functools.cache
def interrupted(level):
    """A checkpoint after three steps, and the state two steps later."""
    run = Pair(level)
    for name in NAMES:
        run.initialize(name)
    for _ in range(3):
        run.step()
    file = io.BytesIO()
    torch.save(run.state(), file)
    run.step()
    run.step()
    return file.getvalue(), copy.deepcopy(run.state())


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_both_optimizers_resume_bitwise_in_any_order_of_the_loads(level, order):
    file, want = interrupted(level)
    reset()
    saved = torch.load(io.BytesIO(file), weights_only=True)
    scales = {"loss_scaler0": (2.0**16, 3), "loss_scaler1": (2.0**15, 1)}  # the generator's session is the later one
    assert saved["amp"] == {name: {"loss_scale": scale, "unskipped": n} for name, (scale, n) in scales.items()}
    run = Pair(level, seed=9)
    run.steps = 3
    for event in order:
        if event == "weights":
            run.load_weights(saved)
        elif event == "amp":
            amp.load_state_dict(saved["amp"])
        else:
            run.initialize(event)
    run.step()
    run.step()
    same(run.state(), want)


@pytest.mark.parametrize("sessions_before", [0, 1])
def test_scalers_that_are_loaded_before_the_last_session_go_to_one_session(sessions_before, capsys):
    """To the first with optimizers, and a warning says what to do; later sessions begin afresh."""
    file, _ = interrupted("O2")
    reset()
    run = Pair("O2")
    for name in NAMES[:sessions_before]:
        run.initialize(name)
    amp.load_state_dict(torch.load(io.BytesIO(file), weights_only=True)["amp"])
    for name in NAMES[sessions_before:]:
        run.initialize(name)
    assert scales_saved() == [2.0**16, 2.0**16]
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [0, 3]
    said = capsys.readouterr().out
    assert "got 2 loss scalers where there are 1: loading the first 1. Call it after the last amp.initialize." in said


def start(**options):
    """A call of ``initialize`` for a new model."""
    model = Net()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0, **options)


def scales_saved():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


def test_scalers_of_a_session_whose_optimizers_are_gone_are_not_saved():
    first = start(loss_scale=2.0)
    second = start(loss_scale=4.0, num_losses=2)
    third = start(loss_scale=8.0)
    assert scales_saved() == [8.0, 4.0, 4.0, 2.0]
    del second
    gc.collect()
    assert scales_saved() == [8.0, 2.0]
    assert None not in (first, third)


def test_an_optimizer_that_a_later_session_takes_counts_for_that_session():
    model, optimizer = start(loss_scale=2.0)
    other = start(loss_scale=4.0)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    assert scales_saved() == [8.0, 4.0]
    assert other is not None


def test_a_fold_that_is_resumed_leaves_the_next_fold_alone():
    """Earlier folds are in a list when the third saves: the third loads its own, the fourth begins afresh."""
    folds = [start(), start(), start()]
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
    saved = amp.state_dict()
    assert [entry["loss_scale"] for entry in saved.values()] == [2.0**10, 2.0**16, 2.0**16]
    del folds
    reset()
    amp.load_state_dict(saved)
    model, optimizer = start()
    assert scales_saved() == [2.0**10]
    with amp.scale_loss(model(torch.ones(4, 4)).float().mean(), optimizer) as scaled:
        scaled.backward()
    fourth = start()
    assert scales_saved() == [2.0**16, 2.0**10]
    del fourth


def test_disabled_sessions_have_no_scalers_and_leave_those_of_others():
    _held = start(loss_scale=2.0)
    amp.initialize(Net(), enabled=False)
    assert scales_saved() == [2.0]
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    assert scales_saved() == [4.0]


# -- sessions without optimizers ---------------------------------------------------------------------------------------
def block(model, optimizer):
    """One pass."""
    with amp.scale_loss(model(torch.ones(4, 4)).float().mean(), optimizer) as scaled:
        scaled.backward()


@pytest.mark.parametrize("average_first", [False, True])
def test_the_scaler_in_use_is_shown_where_an_average_is_initialized_without_optimizers(average_first):
    """Mean teachers and MoCo initialize the averaged model in a session of its own; apex saved one scaler."""
    if average_first:
        amp.initialize(Net(), opt_level="O2", verbosity=0)
    model, optimizer = start()
    if not average_first:
        amp.initialize(Net(), opt_level="O2", verbosity=0)
    block(model, optimizer)
    (scaler,) = amp._amp_state.loss_scalers
    assert scaler._unskipped == 1
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1}}
    scaler._loss_scale = 2.0**8
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 2.0**8
    with amp.scale_loss(torch.ones(()), []) as scaled:
        assert scaled.item() == 2.0**8


def test_a_scaler_that_a_script_puts_into_the_list_goes_to_the_session_in_use():
    _model, optimizer = start()
    amp.initialize(Net(), opt_level="O2", verbosity=0)
    amp._amp_state.loss_scalers[0] = amp.scaler.LossScaler(4.0)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 4.0


@pytest.mark.parametrize("order", list(itertools.permutations(["model", "average", "amp"])), ids="-".join)
def test_a_checkpoint_goes_to_the_scaler_in_use_in_any_order(order, capsys):
    held = None
    for event in order:
        if event == "model":
            held = start()
        elif event == "average":
            amp.initialize(Net(), opt_level="O2", verbosity=0)
        else:
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})
    with amp.scale_loss(torch.ones(()), held[1]) as scaled:
        assert scaled.item() == 512.0
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 8}}
    assert "Warning" not in capsys.readouterr().out


def test_a_session_without_optimizers_has_its_scalers_shown_where_it_is_alone():
    _held = start(loss_scale=2.0)
    del _held
    gc.collect()
    amp.initialize(Net(), opt_level="O2", loss_scale=4.0, verbosity=0)
    assert scales_saved() == [4.0]
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0]


# -- runs beside one another -------------------------------------------------------------------------------------------
def test_a_second_run_in_one_process_is_told_nothing(capsys):
    """A notebook's cell that is run again: the latest session's scaler is restored, and the earlier run's stays."""
    runs = []
    for _ in range(2):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        runs.append(amp.initialize(model, optimizer, opt_level="O2", verbosity=0))
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})
    assert capsys.readouterr().out == ""
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    assert scales == [512.0, 65536.0]


def test_a_scaler_of_the_latest_session_that_is_missing(capsys):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})
    said = capsys.readouterr().out
    told = "got 1 loss scalers where there are 2: loading the first 1. Call it after the last amp.initialize."
    assert said == f"Warning: amp.load_state_dict {told}\n"
