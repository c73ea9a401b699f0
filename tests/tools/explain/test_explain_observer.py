"""Explain leaves the run that it observes as it would have been, bitwise, and keeps little."""

import copy
import dataclasses
import gc
import random
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from amp_training import initialized, make_step
from explain_kit import explain, explainer, told
from internals import observers, reset
from packaging.version import Version
from torch import nn

from ampcompat import amp
from ampcompat._torch import TORCH
from ampcompat.amp import observers as amp_observers
from ampcompat.tools.explain.again import ANOTHER, MOST_FORWARDS, run_again
from ampcompat.tools.explain.observer import OverflowExplainer

#: What looks at a loss, and copies the scale.
LOOK = {"detach", "amin", "amax", "neg", "maximum", "isfinite", "eq", "abs", "ne", "mul", "stack", "_to_copy"}
LOOK.add("_local_scalar_dense")


class Net(nn.Module):
    """Draws random numbers, writes buffers, and overflows on a batch of large numbers."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.bn = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("queue", torch.zeros(4, 8))

    def forward(self, x, boost=1.0):
        with torch.no_grad():
            self.calls += 1
            self.queue.copy_(torch.roll(self.queue, 1, 0))
            self.queue[0] = x[0]
        h = F.dropout(torch.relu(self.bn(self.fc1(x))), 0.5)
        if random.random() < 0.5:
            h = h * 2
        return self.fc2(h) * boost + self.queue.sum() * 1e-3


def run(level, explained, accumulate=1, fused=False, steps=6):
    torch.manual_seed(0)
    random.seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused or None)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if explained:
        explain()
    seen = []
    for step in range(steps):
        for _ in range(accumulate):
            x = torch.randn(8, 8)
            boost = 1e38 if step == 3 else 1.0
            with amp.scale_loss(model(x, boost).float().pow(2).mean(), optimizer) as scaled:
                scaled.backward()
            seen.append(scaled.detach().clone())
        seen.extend(p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None)
        optimizer.step()
        seen.append(torch.tensor(float(amp.step_was_skipped(optimizer))))
        optimizer.zero_grad()
    seen.extend(v.clone() for v in model.state_dict().values())
    seen.append(torch.rand(3))
    seen.append(torch.tensor(random.random()))
    return seen


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bitwise_the_same_run(level, accumulate, capsys):
    plain = run(level, False, accumulate)
    reset()
    watched = run(level, True, accumulate)
    seen = told(capsys)
    assert seen.faults or seen.unknown
    assert len(plain) == len(watched)
    for a, b in zip(plain, watched, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_fused_optimizer_is_asked_at_the_next_block(capsys):
    run("O1", True, fused=True)
    assert told(capsys).first["step"] == 4


def test_running_again_draws_the_same_random_numbers_and_leaves_buffers():
    class Draws(Net):
        def forward(self, x):
            with torch.no_grad():
                self.calls += 1
            h = F.dropout(torch.relu(self.bn(self.fc1(x))), 0.5)
            return self.fc2(h * 2 if random.random() < 0.5 else h)

    torch.manual_seed(0)
    model, optimizer = initialized(Draws(), "O1")
    explain()
    drawn = []
    fc2 = model.fc2.register_forward_hook(lambda module, given, output: drawn.append(given[0].detach().clone()))
    for _ in range(3):
        loss = model(torch.randn(8, 8)).mean()
    after = copy.deepcopy(model.state_dict())
    finding = run_again(explainer().forwards.kept[-1], backward=False)
    assert finding.birth is None
    assert finding.known != ANOTHER
    fc2.remove()
    assert torch.equal(drawn[-1], drawn[-2])
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, after[name])] == []
    loss.backward()  # the graph of the run is untouched


def test_a_forward_that_draws_late_draws_the_same_again():
    """The first forwards draw nothing from Python's generator."""
    drawn = []

    class Late(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 4:
                drawn.append(random.random())
            return super().forward(x)

    model, _ = initialized(Late(4, 4), "O1")
    explain()
    for _ in range(5):
        model(torch.ones(2, 4))
    outside = random.getstate()
    run_again(explainer().forwards.kept[-1], backward=False)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]
    assert random.getstate() == outside


def test_a_forward_that_reads_what_it_writes_is_another_forward(capsys):
    """It is run again with buffers that its first run has written; they stay as they were."""
    seen = []

    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            seen.append(int(self.calls))
            return super().forward(x) * self.calls

    model, _ = initialized(Counts(), "O1")
    explain()
    for _ in range(3):
        model(torch.ones(1, 2))
    assert run_again(explainer().forwards.kept[-1], backward=False) == (None, ANOTHER)
    assert seen == [1, 2, 3, 4]
    assert model.calls == 3


def test_a_model_is_not_kept_alive():
    model, optimizer = initialized(Net(), "O1")
    explain()
    make_step(optimizer, model(torch.randn(8, 8)).mean())
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_memory_is_bounded():
    model = nn.Linear(8, 8)
    model, optimizer = initialized(model, "O1")
    explain()
    inputs = []
    for _ in range(4 * MOST_FORWARDS):  # forwards that no backward follows
        x = torch.randn(4, 8)
        inputs.append(weakref.ref(x))
        model(x)
    del x
    assert len(explainer().forwards.kept) == MOST_FORWARDS
    gc.collect()
    assert sum(ref() is not None for ref in inputs) <= MOST_FORWARDS
    for _ in range(3):
        make_step(optimizer, model(torch.randn(4, 8)).mean())
    assert not explainer().forwards.kept
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert not explainer().forwards.kept


def test_nothing_is_kept_or_hooked_while_it_is_off():
    model = amp.initialize(nn.Linear(8, 8), opt_level="O1", verbosity=0)
    y = model(torch.randn(2, 8))
    assert not observers()
    assert not y._backward_hooks


def test_without_overflow_only_steps_are_examined():
    """Forwards, blocks and backward run the same ops as without it; a step's ops come first."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def ops(explained):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model, optimizer = initialized(model, "O2")
        if explained:
            explain()
        found = []
        for _ in range(3):
            x = torch.randn(4, 8)
            with Ops() as outside:
                optimizer.zero_grad()
                with amp.scale_loss(model(x).mean(), optimizer) as scaled:
                    scaled.backward()
            with Ops() as step:
                optimizer.step()
            found.append((outside.names, step.names))
        found_observers = amp_observers.observers()
        found_observers[:] = [one for one in found_observers if not isinstance(one, OverflowExplainer)]
        return found[1:]  # the first block looks at what there is before any step

    for (plain, plain_step), (observed, step) in zip(ops(False), ops(True), strict=True):
        # A block looks at its loss, by one host sync.
        added = Counter(observed) - Counter(plain)
        assert set(added) <= LOOK
        assert added["_local_scalar_dense"] == 1
        assert step[: len(plain_step)] == plain_step
        # All flags are read by one tolist(): one host sync, and no op on the CPU.
        assert step[len(plain_step) :].count("stack") > 0
        assert "_local_scalar_dense" not in step[len(plain_step) :]
        assert not [name for name in step[len(plain_step) :] if name.endswith("_")]  # and nothing is written


def test_a_fault_is_told_once_and_the_limit_ends_it(capsys):
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O1")
    explain(limit=2)
    for batch in [torch.full((2, 4), bad) for bad in (float("nan"), float("nan"), 1e6, float("inf"))]:
        make_step(optimizer, model(batch).float().mean())
        optimizer.zero_grad()
    seen = told(capsys)
    assert [fault["see"] for fault in seen.faults] == [["input"], ["too large"]]
    assert (seen.counts["steps"], seen.counts["skipped"], len(seen.counts["told"])) == (4, 4, 2)


def test_a_batch_that_cannot_be_run_again_does_not_stop_the_run(capsys):
    class Once(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("only once")
            return super().forward(x)

    model = Once(4, 4)
    model, optimizer = initialized(model, "O1")
    explain()
    make_step(optimizer, model(torch.full((2, 4), float("nan"))).mean())
    seen = told(capsys)
    assert "RuntimeError: only once" in seen.unknown[0]["message"]
    assert (seen.faults, seen.counts["lost"]) == ([], {"loss": 1})
    assert observers()
    assert torch.is_autocast_enabled("cpu")


def test_a_batch_that_was_written_since_is_not_run_again(capsys):
    """Another batch lies there by then, whose values say nothing."""
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O1")
    explain()
    x = torch.full((2, 4), float("nan"))
    loss = model(x).mean()
    x.fill_(float("inf"))
    make_step(optimizer, loss)
    assert told(capsys).faults == []


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str = ""


class Frozen(Mapping):
    def __init__(self, given):
        self.given = dict(given)

    def __getitem__(self, key):
        return self.given[key]

    def __iter__(self):
        return iter(self.given)

    def __len__(self):
        return len(self.given)


class Batch:
    """An object that moves itself, as many libraries have."""

    def __init__(self, x):
        self.x, self.seen = x, []

    def to(self, *args, **kwargs):
        return self


class Cloned(Batch):
    """One that keeps its tensors where nobody else knows."""

    __slots__ = ()

    def clone(self):
        return Cloned(self.x.clone())


BATCHES = {
    "list": (lambda x: [x], lambda batch: batch[0]),
    "dict": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "OrderedDict": (lambda x: OrderedDict(x=x), lambda batch: batch["x"]),
    "defaultdict": (lambda x: defaultdict(list, x=x), lambda batch: batch["x"]),
    "UserDict": (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    "Mapping": (lambda x: Frozen({"x": x}), lambda batch: batch["x"]),
    "dataclass": (Pair, lambda batch: batch.x),
    "object with to": (Batch, lambda batch: batch.x),
    "object with clone": (Cloned, lambda batch: batch.x),
    "nested": (lambda x: {"pairs": [(Pair(x), 1)]}, lambda batch: batch["pairs"][0][0].x),
}


class WritesItsBatch(nn.Module):
    """Adds in place to its batch, and takes the logarithm of zero."""

    def __init__(self, read):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.read = read

    def forward(self, batch):
        x = self.read(batch)
        x += 1
        return torch.log(self.fc(x) * 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", BATCHES)
def test_what_a_forward_writes_into_its_batch_is_written_once(kind, level, capsys):
    """Where that can be seen, the batch is not run again: it is not what the forward got."""
    pack, read = BATCHES[kind]
    model = WritesItsBatch(read)
    model, optimizer = initialized(model, level)
    explain()
    for _ in range(2):
        batch = pack(torch.zeros(2, 4, dtype=torch.float32 if level == "O1" else torch.half))
        make_step(optimizer, model(batch).float().mean())
        assert torch.equal(read(batch).float(), torch.ones(2, 4))
    assert told(capsys).first["op"] == "log"


@pytest.mark.parametrize("empty", [list, dict, set])
def test_running_again_does_not_append_to_arguments(empty, capsys):
    """What a forward adds to a list, dict or set among its arguments is there once."""

    class Collects(nn.Linear):
        def forward(self, x, seen):
            if isinstance(seen, dict):
                seen[len(seen)] = "layer"
            else:
                (seen.append if isinstance(seen, list) else seen.add)(len(seen))
            return torch.log(super().forward(x) * 0)

    model = Collects(4, 4)
    model, optimizer = initialized(model, "O1")
    explain()
    seen = empty()
    make_step(optimizer, model(torch.ones(2, 4), seen=seen).float().mean())
    assert told(capsys).first["op"] == "log"
    assert len(seen) == 1


def test_a_block_of_no_optimizer_is_explained_too(capsys):
    """It is for the gradient of an input; here its loss is not finite, in code that is watched from the second time."""
    model, _ = initialized(nn.Linear(4, 4), "O1")
    explain()
    for _ in range(2):
        x = torch.ones(2, 4, requires_grad=True)
        with amp.scale_loss(torch.log(model(x).float() * 0).mean(), []) as scaled:
            scaled.backward()
    seen = told(capsys)
    assert seen.unknown[0]["step"] == 1
    assert seen.first["op"] == "log"


def test_a_block_of_no_optimizer_is_of_the_step_to_come(capsys):
    model, optimizer = initialized(nn.Linear(4, 4), "O1")
    explain()
    for _ in range(5):
        make_step(optimizer, model(torch.ones(2, 4)).float().mean())
    x = torch.ones(2, 4, requires_grad=True)
    with amp.scale_loss(torch.log(model(x).float() * 0).mean(), []) as scaled:
        scaled.backward()
    assert told(capsys).unknown[0]["step"] == 6


def test_two_models_and_the_one_at_fault(capsys):
    class Generator(nn.Sequential):
        pass

    class Critic(nn.Sequential):
        pass

    torch.manual_seed(0)
    g, d = Generator(nn.Linear(4, 4)), Critic(nn.Linear(4, 4), nn.Linear(4, 1))
    opt_g, opt_d = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d))
    [g, d], [opt_g, opt_d] = amp.initialize([g, d], [opt_g, opt_d], opt_level="O1", num_losses=2, verbosity=0)
    explain()
    with torch.no_grad():
        d[1].weight.fill_(1e5)
    fake = g(torch.randn(3, 4))
    make_step(opt_d, d(fake.detach()).float().mean() * 0, loss_id=0)
    make_step(opt_g, d(fake).float().mean(), loss_id=1)
    seen = told(capsys)
    assert [(fault["module"], fault["model"]) for fault in seen.faults] == [("1", "Critic")]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_wrong_limit_is_refused(limit):
    with pytest.raises(ValueError, match="positive integer"):
        amp.explain_overflows(limit)
    assert not observers()


def test_twice_is_once():
    amp.explain_overflows()
    amp.explain_overflows(limit=5)
    assert explainer().telling.limit == 5


def test_the_scale_that_is_named_is_that_of_the_loss(capsys):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**20
    explain()
    for _ in range(4):
        optimizer.zero_grad()
        for loss_id in (0, 1):
            with amp.scale_loss(model(torch.randn(4, 8)).sum(), optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
        optimizer.step()
    assert told(capsys).first["scale"] == 131072


def test_a_lost_weight_is_not_told_as_a_fault_of_its_own(capsys):
    model = nn.Sequential(nn.Linear(4, 4))
    model, optimizer = initialized(model, "O3")
    explain()
    for _ in range(3):
        make_step(optimizer, model(torch.full((2, 4), 6e4)).pow(2).mean())
    assert len(told(capsys).faults) == 1


@pytest.mark.skipif(Version("2.5") > TORCH, reason="torch 2.4 runs compiled code while it is watched: aten's names")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler's own
def test_a_compiled_model_is_watched(capsys):
    """It cannot be run again; torch runs it uncompiled where a mode wants to see its ops."""
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    model, optimizer = initialized(model, "O1")
    explain()
    fast = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        make_step(optimizer, fast(torch.full((2, 8), 1e38)).float().pow(2).mean())
    seen = told(capsys)
    assert len(seen.unknown) == 1
    assert (seen.first["function"], seen.first["see"]) == ("linear", ["too large"])
