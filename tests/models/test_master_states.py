"""Each row of the table of masters (``state_tables``), both copies, seen from outside.

Weights are thirds: no half holds them, so a master that was rounded on its way would show.
"""

import copy
import pickle

import pytest
import torch
from nets import MASTER_LEVELS
from seeded import seeded
from state_tables import MASTERS

from ampcompat import amp

pytestmark = pytest.mark.device

ROW = torch.tensor([1.0, -0.25, 0.0, 3.0])  # exact in both halves
LATE = 12  # steps made before


def thirds(seed=0):
    return torch.randn(2, 4, generator=seeded(seed)) / 3


class Run:
    """A linear model with one half weight of two rows and its master."""

    def __init__(self, level, steps=0):
        self.level = level
        self.model = torch.nn.Linear(4, 2, bias=False)
        self.exact = thirds()
        with torch.no_grad():
            self.model.weight.copy_(self.exact)
        self.model, self.optimizer = amp.initialize(
            self.model, torch.optim.SGD(self.model.parameters(), lr=1.0), opt_level=level, verbosity=0
        )
        self.dtype = self.model.weight.dtype
        for _ in range(steps):  # each with a gradient of zero: no bit moves
            self.step(torch.zeros(2, 4))

    @property
    def held(self):
        """The master, as the optimizer holds it: looking at it changes nothing."""
        return self.optimizer.param_groups[0]["params"][0]

    def forward(self):
        return self.model(torch.ones(1, 4, device=self.model.weight.device))

    def block(self, gradient):
        self.forward()
        with amp.scale_loss((self.model.weight.float() * gradient).sum(), self.optimizer) as scaled:
            scaled.backward()

    def step(self, gradient):
        self.block(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def copies_are(self, value, half=None):
        """Both copies, to the bit; ``half`` defaults to ``value`` rounded. Masters follow when they are asked for."""
        half = value.to(self.dtype) if half is None else half
        assert self.model.weight.dtype == self.dtype
        assert torch.equal(self.model.weight.detach().cpu(), half.cpu())
        list(amp.master_params(self.optimizer))
        assert torch.equal(self.held.detach().cpu(), value.cpu())

    def taken(self, row):
        """The master after row 0 of the model was written: the other row keeps its low bits."""
        value = self.exact.clone()
        value[0] = row
        return value


def test_the_life_of_a_master_in_numbers():
    """The first table at the head of ``ampcompat/amp/half/masters.py``."""
    model = torch.nn.Linear(2, 1, bias=False)
    weight = model.weight
    with torch.no_grad():
        weight.copy_(torch.tensor([1.0003, 3.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def copies():
        held = optimizer.param_groups[0]["params"][0]
        return [[round(element, 4) for element in copy_of.flatten().tolist()] for copy_of in (weight, held)]

    def step(gradient):
        with amp.scale_loss((weight.float() * gradient).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert copies() == [[1.0, 3.0], [1.0003, 3.0]]
    step(torch.tensor([-0.0004, 0.0]))
    assert copies() == [[1.001, 3.0], [1.0007, 3.0]]
    with torch.no_grad():
        weight[0, 1] = 0.5
    assert copies() == [[1.001, 0.5], [1.0007, 3.0]]
    model(torch.ones(1, 2))
    assert copies() == [[1.001, 0.5], [1.0007, 3.0]]
    step(torch.zeros(2))
    assert copies() == [[1.001, 0.5], [1.0007, 0.5]]


def initialized(level):
    run = Run(level)
    run.copies_are(run.exact)
    assert run.held.dtype == torch.float32
    assert not torch.equal(run.exact, run.exact.to(run.dtype).float())


def stepped(level):
    run = Run(level)
    gradient = torch.full((2, 4), 2.0**-10)
    run.step(gradient)
    run.copies_are(run.exact - gradient)


def loaded(level):
    """What was loaded stays as it is when the model is trained on, also with ``assign=True``."""
    for assign in (False, True):
        run, other = Run(level), thirds(1)
        run.model.load_state_dict({"weight": other}, assign=assign)
        run.copies_are(thirds(1))
        run.forward()
        run.copies_are(thirds(1))
        run.step(torch.full((2, 4), 2.0**-10))
        run.copies_are(thirds(1) - 2.0**-10)
        assert torch.equal(other, thirds(1))


def write_in_place(weight, row=ROW):
    with torch.no_grad():
        weight[0] = row


def write_by_foreach(weight, row=ROW):
    torch._foreach_copy_([weight.detach()[0]], [row.to(weight.dtype)])


def write_in_inference_mode(weight, row=ROW):
    with torch.inference_mode():
        weight[0] = row


def assign_data(weight, row=ROW):
    data = weight.data.clone()
    data[0] = row
    weight.data = data


def write_through_data(weight, row=ROW):
    """Past the version counter, as most scripts do that swap weights."""
    weight.data[0] = row


COUNTED_WRITES = (write_in_place, write_by_foreach, write_in_inference_mode, assign_data)
WRITES = (*COUNTED_WRITES, write_through_data)


def half_written(level):
    for write in COUNTED_WRITES:
        for steps in (0, LATE):
            run = Run(level, steps)
            write(run.model.weight)
            run.forward()
            run.copies_are(run.taken(ROW))


def half_written_and_back_after_a_step(level):
    """What the weight was before the first step is not kept as a backup."""
    run = Run(level, LATE)
    before = run.model.weight.detach().clone()
    write_in_place(run.model.weight)
    gradient = torch.full((2, 4), 0.25)
    run.step(gradient)
    run.copies_are(run.taken(ROW) - gradient)
    with torch.no_grad():
        run.model.weight.copy_(before)
    run.forward()
    run.copies_are(before.float())


def half_written_before_a_step(level):
    """No forward comes between the write and the step, which does not undo it."""
    run = Run(level)
    with amp.scale_loss((run.model.weight.float() * 2.0**-10).sum(), run.optimizer) as scaled:
        scaled.backward()
    write_in_place(run.model.weight)
    run.optimizer.step()
    run.copies_are(run.taken(ROW) - 2.0**-10)


def half_written_through_data(level):
    for steps in (0, LATE):
        run = Run(level, steps)
        write_through_data(run.model.weight)
        run.forward()
        run.copies_are(run.taken(ROW))


def half_written_past_torch(level):
    """No version tells of a write through an array: ``sync_masters`` finds it."""
    run = Run(level)
    if run.model.weight.is_cuda:
        pytest.skip("numpy sees host memory alone")
    run.model.weight.data.view(torch.int16).numpy()[0] = ROW.to(run.dtype).view(torch.int16).numpy()
    run.forward()
    run.copies_are(run.exact, half=run.taken(ROW).to(run.dtype))
    amp.sync_masters(run.model)
    run.copies_are(run.taken(ROW))
    run.model.weight.data.view(torch.int16).numpy()[0] = 0
    run.step(torch.zeros(2, 4))
    run.copies_are(run.taken(ROW))


def half_written_and_written_back(level):
    """An average is put in and evaluated, and the weights are put back."""
    for write in WRITES:
        for steps in (0, LATE):
            run = Run(level, steps)
            before = run.model.weight.detach().clone()
            for _ in range(2):
                write(run.model.weight)
                run.forward()
                write(run.model.weight, before[0])
                run.forward()
                run.copies_are(run.exact)


def half_written_for_backward_passes(level):
    """An attack on the weights: each step is as if they had not been written."""
    for write in WRITES:
        for steps in (0, LATE):
            run = Run(level, steps)
            gradient, want = torch.full((2, 4), 2.0**-10), run.exact.clone()
            for _ in range(3):
                before = run.model.weight.detach().clone()
                run.block(gradient)
                for _ in range(2):
                    write(run.model.weight, run.model.weight.detach()[0] + 0.125)
                    run.block(gradient)
                write(run.model.weight, before[0])
                run.optimizer.step()
                run.optimizer.zero_grad()
                want -= 3 * gradient
            run.forward()
            run.copies_are(want)


def itself(model):
    return model


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def half_written_and_saved_or_copied(level):
    """Saves and copies have what the model computes with, with no forward between."""
    for write in WRITES:
        for steps in (0, LATE):
            for way in (itself, copy.deepcopy, by_pickle, amp.unwrap):
                run = Run(level, steps)
                write(run.model.weight)
                assert torch.equal(way(run.model).state_dict()["weight"], run.taken(ROW))


def exported_after_it_was_written_back(level):
    """What is then written into the state dict counts."""
    run = Run(level, LATE)
    before = run.model.weight.detach().clone()
    write_in_place(run.model.weight)
    run.forward()
    write_in_place(run.model.weight, before[0])
    run.forward()
    run.model.state_dict()["weight"].data.add_(2.0**-20)
    run.forward()
    want = run.exact + 2.0**-20
    run.copies_are(want)


def value_written(level):
    for steps in (0, LATE):
        run, other = Run(level, steps), thirds(2)
        with torch.no_grad():
            next(amp.master_params(run.optimizer)).copy_(other)
        run.forward()
        run.copies_are(other)
        with torch.no_grad():
            run.held.copy_(run.exact)
        run.forward()
        run.copies_are(run.exact)
        next(amp.master_params(run.optimizer)).data.copy_(other)
        run.forward()
        run.copies_are(other)
        run.model.state_dict()["weight"].data.copy_(run.exact)
        run.forward()
        run.copies_are(run.exact)


def value_written_through_data(level):
    for steps in (0, LATE):
        run, other = Run(level, steps), thirds(2)
        run.held.data.copy_(other)
        run.forward()
        run.copies_are(other)


def value_written_while_half_was_looked_at(level):
    """Neither order of a look at one copy and a write to the other loses the write."""
    for write in (write_in_place, write_through_data):
        run = Run(level)
        run.model.weight.data.abs()
        write(run.held)
        run.forward()
        run.copies_are(run.taken(ROW))
        run = Run(level)
        write(run.held)
        run.model.weight.data.abs()
        run.forward()
        run.copies_are(run.taken(ROW))
        run = Run(level)
        write(run.model.weight)
        run.held.data.abs()
        run.forward()
        run.copies_are(run.taken(ROW))


def both_written(level):
    """The model's elements count; who asks for the masters by their names has them follow first."""
    run = Run(level)
    with torch.no_grad():
        run.held[1] = 1 / 3
        run.model.weight[0] = ROW
    run.forward()
    run.copies_are(torch.stack([ROW, run.exact[1].to(run.dtype).float()]), half=run.model.weight.detach())
    run = Run(level)
    alias = run.held.data
    write_through_data(run.model.weight)
    alias.copy_(thirds(2))
    run.copies_are(torch.stack([ROW, run.exact[1].to(run.dtype).float()]), half=run.model.weight.detach())
    for ask in (lambda run: next(amp.master_params(run.optimizer)), lambda run: run.model.state_dict()["weight"]):
        run = Run(level)
        with torch.no_grad():
            run.model.weight[0] = ROW
            ask(run)[1] = 1 / 3
        run.forward()
        run.copies_are(torch.stack([ROW, torch.full((4,), 1 / 3)]))


def attribute_set(level):
    run = Run(level)
    run.model.weight.lr_mult = 0.5
    run.held.place = 3
    assert (run.held.lr_mult, run.model.weight.place) == (0.5, 3)


def requires_grad_set(level):
    run = Run(level)
    for requires_grad in (False, True):
        run.model.requires_grad_(requires_grad)
        assert {param.requires_grad for param in amp.master_params(run.optimizer)} == {requires_grad}
        run.copies_are(run.exact)


def replaced(level):
    run = Run(level)
    old = run.model.weight
    run.model.weight = torch.nn.Parameter(thirds(1).to(run.dtype))
    run.forward()
    run.optimizer.step()
    assert torch.equal(run.held, run.exact)
    assert torch.equal(old, run.exact.to(run.dtype))
    with pytest.warns(UserWarning, match="the optimizer holds the old one, and does not train the new one"):
        saved = run.model.state_dict()
    assert torch.equal(saved["weight"], thirds(1).to(run.dtype).float())


def buffer_assigned(level):
    run = Run(level)
    run.model.register_buffer("mean", thirds(3).to(run.dtype))
    run.model.load_state_dict({"mean": thirds(3)}, strict=False)
    for other in (thirds(3).to(run.dtype), thirds(4), thirds(4).to(run.dtype)[:1]):
        run.model.mean = other
        run.forward()
        assert run.model.mean is other
        assert torch.equal(run.model.state_dict()["mean"], other.float())


def replaced_and_added(level):
    run = Run(level)
    new = run.model.weight = torch.nn.Parameter(thirds(1).to(run.dtype))
    run.optimizer.add_param_group({"params": [new], "lr": 1.0})
    gradient = torch.full((2, 4), 2.0**-10)
    run.block(gradient)
    run.optimizer.step()
    want = thirds(1).to(run.dtype).float() - gradient
    assert torch.equal(run.held, run.exact)
    assert torch.equal(run.optimizer.param_groups[1]["params"][0], want)
    assert torch.equal(new, want.to(run.dtype))


def moved_to_a_device(level):
    if not torch.cuda.is_available():
        pytest.skip("needs a second device")
    with torch.device("cpu"):
        run = Run(level)
    run.model.to("cuda")
    with pytest.warns(UserWarning, match="its master weights follow"):
        run.forward()
    assert run.model.weight.is_cuda
    assert run.held.is_cuda
    run.copies_are(run.exact)


def laid_out_anew(level):
    run = Run(level)
    run.model.weight.data = run.model.weight.data.t().contiguous().t()
    run.forward()
    run.copies_are(run.exact)
    assert run.held.stride() == (4, 1)
    run.step(torch.full((2, 4), 2.0**-10))
    run.copies_are(run.exact - 2.0**-10)
    assert run.model.weight.stride() == (1, 2)
    assert run.held.stride() == (4, 1)


def made_float(level, dtype=torch.float32):
    run = Run(level)
    run.model.to(dtype)
    run.model.weight.data[0] = ROW
    with pytest.warns(UserWarning, match="the dtype of the model is managed by amp"):
        run.forward()
    run.copies_are(run.taken(ROW))


def made_double(level):
    made_float(level, torch.float64)


def made_half_again(level):
    run = Run(level)
    run.model.to(run.dtype)
    run.forward()
    run.copies_are(run.exact)


def copied(level):
    run = Run(level)
    for copy_of in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        model, optimizer = copy_of((run.model, run.optimizer))
        (master,) = amp.master_params(optimizer)
        assert model.weight is not run.model.weight
        assert master is not run.held
        assert torch.equal(model.weight, run.model.weight)
        assert torch.equal(master, run.exact)
        assert torch.equal(model.state_dict()["weight"], run.exact)
        with torch.no_grad():
            master.fill_(0.5)
        model(torch.ones(1, 4))
        assert torch.equal(model.weight, torch.full_like(model.weight, 0.5))
        run.forward()
        run.copies_are(run.exact)


def initialized_at_another_level(level):
    run = Run(level)
    amp.initialize(run.model, run.optimizer, opt_level="O1", verbosity=0)
    assert run.model.weight.dtype == torch.float32
    assert torch.equal(run.model.weight, run.exact)
    assert run.held is run.model.weight


#: Tests of each row of the table, by its first cell.
EVENTS = {
    "`initialize`": [initialized],
    "`optimizer.step`": [stepped],
    "`load_state_dict`": [loaded],
    "half written, also through `data`": [
        half_written,
        half_written_before_a_step,
        half_written_and_back_after_a_step,
        half_written_through_data,
    ],
    "half written past torch, as through numpy": [half_written_past_torch],
    "half written, and written back": [
        half_written_and_written_back,
        half_written_for_backward_passes,
        half_written_and_saved_or_copied,
        exported_after_it_was_written_back,
    ],
    "value written, also through `data`": [
        value_written,
        value_written_through_data,
        value_written_while_half_was_looked_at,
    ],
    "both written": [both_written],
    "attribute set on either": [attribute_set],
    "`half.requires_grad` set": [requires_grad_set],
    "parameter replaced in its module": [replaced],
    "replaced, and added to an optimizer": [replaced_and_added],
    "buffer assigned in its module": [buffer_assigned],
    "`model.to(device)`": [moved_to_a_device],
    "other strides (`memory_format=`)": [laid_out_anew],
    "`model.float()` and the like": [made_float, made_double, made_half_again],
    "deepcopy, pickle": [copied],
    "`initialize` at another level": [initialized_at_another_level],
}


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("act", [act for acts in EVENTS.values() for act in acts], ids=lambda act: act.__name__)
def test_row(act, level):
    act(level)


def test_levels_without_masters_step_the_weight_itself():
    for level in ("O0", "O1", "O3"):
        run = Run(level)
        assert run.held is run.model.weight


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_without_masters_the_half_weight_is_stepped(level):
    run = Run(level)
    amp.initialize(run.model, run.optimizer, opt_level="O3", cast_model_type=run.dtype, loss_scale=128.0, verbosity=0)
    assert run.held is run.model.weight
    before = run.model.weight.detach().clone()
    run.step(torch.full((2, 4), 0.5))
    assert torch.equal(run.model.weight, before - 0.5)
    assert torch.equal(run.model.state_dict()["weight"], run.model.weight.float())


def test_every_row_of_the_table_has_a_test():
    assert MASTERS.events == list(EVENTS)
    assert all(len(row) == len(MASTERS.head) and all(row) for row in MASTERS.rows)
