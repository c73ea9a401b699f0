"""``group["step"]`` of the optimizers that count: an int whenever a script looks, and the exact one where it can be."""

import copy
import json
import pickle

import pytest
import torch
from amp_training import make_step

from ampcompat import _torch, amp
from ampcompat.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad

pytestmark = [pytest.mark.device, pytest.mark.torch]

MAKERS = {
    "FusedAdam": FusedAdam,
    "FusedAdam capturable": lambda params: FusedAdam(params, capturable=True),
    "FusedLAMB": FusedLAMB,
    "FusedNovoGrad": FusedNovoGrad,
}
makers = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())


def params_with_grads():
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def two_groups(maker):
    first, second = params_with_grads()
    return maker([{"params": [first]}, {"params": [second]}])


def take(optimizer, skips=()):
    """One step for each flag, as a scaler makes it."""
    for skip in skips:
        optimizer.found_inf = torch.tensor(float(skip))
        optimizer.step()
        del optimizer.found_inf
        assert all(type(group["step"]) is int for group in optimizer.param_groups)


def shown(optimizer):
    assert all(type(group["step"]) is int for group in optimizer.param_groups)
    return [group["step"] for group in optimizer.param_groups]


class SlowCopy:
    """A copy to the host that arrives when the test says so."""

    made = []

    def __init__(self, values):
        self.values, self.here = [value.item() for value in values], False
        SlowCopy.made.append(self)

    def arrived(self):
        return self.here

    def read(self):
        assert self.here, "a host sync"
        return self.values


@pytest.fixture
def far_device(monkeypatch):
    """The host cannot read numbers of the device; copies arrive late."""
    SlowCopy.made = []
    monkeypatch.setattr(_torch, "host_value", lambda number: None)
    monkeypatch.setattr(_torch, "HostCopy", SlowCopy)
    return SlowCopy.made


@makers
def test_is_an_int_that_counts_steps(maker):
    optimizer = two_groups(maker)
    for want in (1, 2, 3):
        optimizer.step()
        assert shown(optimizer) == [want, want]
    assert json.loads(json.dumps([group["step"] for group in optimizer.state_dict()["param_groups"]])) == [3, 3]


@makers
def test_leaves_out_skipped_steps(maker):
    optimizer = two_groups(maker)
    take(optimizer, [True, False, True, False, False])
    assert shown(optimizer) == [3, 3]
    optimizer.step()
    assert shown(optimizer) == [4, 4]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@makers
def test_leaves_out_steps_that_amp_skips(maker, level):
    """Right after the step on the CPU; a device may show the step as made until somebody asks for the exact count."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model, optimizer = amp.initialize(
        model, maker(model.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    counted, saved = [], []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        make_step(optimizer, model(torch.ones(4, 3)).float().square().mean() * factor)
        counted += shown(optimizer)
        saved += [group["step"] for group in optimizer.state_dict()["param_groups"]]
    assert saved == [1, 1, 2]
    may_show = [[1, 1, 2]] if model.weight.is_cpu else [[1, 1, 2], [1, 2, 2]]
    assert counted in may_show


@makers
def test_a_skip_that_the_host_hears_of_late_is_taken_back(maker, far_device):
    optimizer = two_groups(maker)
    take(optimizer, [False, True])
    assert shown(optimizer) == [2, 2], "nobody has told the host yet"
    take(optimizer, [False])
    assert len(far_device) == 1, "one copy at a time"
    far_device[0].here = True  # it tells of the first step alone
    take(optimizer, [False])
    assert shown(optimizer) == [4, 4]
    far_device[1].here = True  # and this one of all four
    take(optimizer, [True])
    assert shown(optimizer) == [4, 4], "three made, and one more of which nothing is known"
    far_device[2].here = True
    take(optimizer, [False])
    assert shown(optimizer) == [4, 4]


@makers
def test_state_dict_and_copies_are_exact(maker, far_device):
    optimizer = two_groups(maker)
    take(optimizer, [True, False, True])
    for through in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        twin = through(optimizer)
        assert shown(twin) == [1, 1]
        take(twin, [False])
        assert [group["step"] for group in twin.state_dict()["param_groups"]] == [2, 2]
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [1, 1]
    assert shown(optimizer) == [1, 1]


@makers
def test_what_the_script_writes_counts(maker, far_device):
    optimizer, plain = two_groups(maker), two_groups(maker)
    take(optimizer, [True, False])
    optimizer.param_groups[0]["step"] = 100
    far_device[0].here = True
    take(optimizer, [False])
    assert shown(optimizer)[0] == 101
    optimizer.param_groups[0]["step"] = 200
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [200, 2]
    # The update rules count on from it, too.
    plain.load_state_dict(optimizer.state_dict())
    for p, q in zip(plain.param_groups, optimizer.param_groups):
        p["params"][0].data.copy_(q["params"][0])
    take(optimizer, [False])
    take(plain, [False])
    for p, q in zip(plain.param_groups, optimizer.param_groups):
        assert torch.equal(p["params"][0], q["params"][0])


@makers
def test_load_state_dict_takes_ints_and_tensors(maker):
    saved = two_groups(maker)
    take(saved, [False, True, False])
    saved = saved.state_dict()
    for group in saved["param_groups"]:
        group["step"] = torch.tensor([group["step"]], dtype=torch.int)  # as apex's capturable FusedAdam saved it
    optimizer = two_groups(maker)
    take(optimizer, [True, True, False])
    optimizer.load_state_dict(saved)
    assert shown(optimizer) == [2, 2]
    take(optimizer, [True, False])
    assert shown(optimizer) == [3, 3]


@makers
def test_groups_come_and_go(maker):
    optimizer = two_groups(maker)
    take(optimizer, [False, True])
    optimizer.add_param_group({"params": params_with_grads()})
    take(optimizer, [False])
    assert shown(optimizer) == [2, 2, 1]
    del optimizer.state[optimizer.param_groups.pop(0)["params"][0]]
    take(optimizer, [True, False])
    assert shown(optimizer) == [3, 2]
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [3, 2]


def test_saving_counts_replays_of_a_graph(far_device, monkeypatch):
    optimizer = two_groups(MAKERS["FusedAdam capturable"])
    optimizer.step()
    monkeypatch.setattr(_torch, "is_capturing", lambda: True)
    optimizer.step()
    monkeypatch.setattr(_torch, "is_capturing", lambda: False)
    for count in optimizer._steps._counts.values():
        count.value.add_(5.0)  # what five replays do
    assert shown(optimizer) == [2, 2]
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [7, 7]
    assert shown(optimizer) == [7, 7]


class TestCapture:
    """A replay runs no Python: a count that is not on the device would stand still."""

    @makers
    def test_of_a_first_step_is_refused(self, maker, monkeypatch):
        optimizer = maker(params_with_grads())
        monkeypatch.setattr(_torch, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"is captured for a CUDA graph .* set optimizer.capturable = True"):
            optimizer.step()
        assert not optimizer.state
        assert "step" not in optimizer.param_groups[0]

    @pytest.mark.parametrize("maker", [FusedAdam, FusedLAMB, FusedNovoGrad])
    def test_of_steps_counted_on_the_host_is_refused(self, maker, monkeypatch):
        optimizer = maker(params_with_grads())
        optimizer.step()
        monkeypatch.setattr(_torch, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="counted on the host"):
            optimizer.step()
        assert shown(optimizer) == [1]

    @makers
    def test_counts_on_the_device_once_capturable(self, maker, monkeypatch):
        optimizer = maker(params_with_grads())
        optimizer.capturable = True
        optimizer.step()
        (count,) = optimizer._steps._counts.values()
        monkeypatch.setattr(_torch, "is_capturing", lambda: True)
        optimizer.step()
        count.value.add_(3)  # three replays
        monkeypatch.undo()
        assert optimizer.state_dict()["param_groups"][0]["step"] == 5

    @makers
    def test_counts_on_the_device_under_a_scaler(self, maker, monkeypatch):
        optimizer = maker(params_with_grads())
        take(optimizer, [0])
        monkeypatch.setattr(_torch, "is_capturing", lambda: True)
        take(optimizer, [0])

    @makers
    def test_of_the_first_step_after_loading_is_refused(self, maker, monkeypatch):
        optimizer = maker(params_with_grads())
        optimizer.capturable = True
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        monkeypatch.setattr(_torch, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="make a step before the capture"):
            optimizer.step()

    @makers
    def test_copies_stay_capturable(self, maker):
        optimizer = maker(params_with_grads())
        optimizer.capturable = True
        assert copy.deepcopy(optimizer).capturable
