"""Training that goes wrong in the ways training does: NaN, inf, no memory, a worker process, another thread."""

import threading

import pytest
import torch
from amp_training import make_step
from internals import masters_of

from ampcompat import _torch, amp
from ampcompat._torch import chunks
from ampcompat.optimizers import FusedAdam, FusedSGD

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),  # 1e-8 is zero in half, where O3 steps
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-4),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1, momentum=0.9),
}
DENSE = ["weight", "bias", "batch norm", "shared", "0-dim"]


class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding = torch.nn.Embedding(5, 4, sparse=kind == "sparse")
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.factor = torch.nn.Parameter(torch.ones(()))
        if kind == "shared":
            self.second.weight = self.first.weight
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.poison = None

    def forward(self, rows):
        h = self.embedding(rows)
        return self.second(self.norm(self.first(h))) * self.factor

    def poisoned(self):
        return {
            "weight": self.first.weight,
            "bias": self.second.bias,
            "batch norm": self.norm.weight,
            "shared": self.first.weight,
            "sparse": self.embedding.weight,
            "0-dim": self.factor,
        }[self.kind]


def train(model, optimizer):
    make_step(optimizer, model(torch.arange(5)).float().square().mean() * 0.01)
    optimizer.zero_grad()


@pytest.mark.cover(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", DENSE)
def test_one_bad_gradient_skips_one_step(kind, name, opt_level, value, capsys):
    skips_one_step(kind, name, opt_level, value, capsys)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_one_bad_sparse_gradient_skips_one_step(opt_level, value, capsys):
    """SGD only, and not at O3: in plain torch too, others refuse sparse gradients, and the CPU refuses half ones."""
    skips_one_step("sparse", "sgd", opt_level, value, capsys)


def skips_one_step(kind, name, opt_level, value, capsys):
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic")
    train(model, optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    hook = model.poisoned().register_hook(lambda grad: grad * value)
    train(model, optimizer)
    hook.remove()
    assert amp.step_was_skipped(optimizer)
    said = [line for line in capsys.readouterr().out.splitlines() if "overflow" in line]
    assert said == ["Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    after = list(amp.master_params(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    train(model, optimizer)
    assert not amp.step_was_skipped(optimizer)
    assert all(p.isfinite().all() for p in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("accumulated", "at"), [(False, 1), (True, 1), (True, 3)])  # a first pass makes all at once
def test_out_of_memory_at_the_exit_of_a_block(accumulated, at, monkeypatch, capsys):
    """Where float32 gradients are made: all are cleared, the next step has none to use, and training goes on."""

    def started():
        torch.manual_seed(0)
        model = Net("weight")
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        return model, optimizer

    def backward(model, optimizer):
        loss = model(torch.arange(5)).float().square().mean() * 0.01
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    made = []

    def copies(halves, like, real=_torch.float32_copies):
        made.append(1)
        if len(made) == at:
            raise MemoryError
        return real(halves, like)

    monkeypatch.setattr(chunks, "CPU_CHUNK", 16)
    model, optimizer = started()
    if accumulated:
        backward(model, optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "float32_copies", copies)
        with pytest.raises(MemoryError):
            backward(model, optimizer)
    assert "to be unscaled are cleared" in capsys.readouterr().out
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    optimizer.zero_grad()
    twin, twin_optimizer = started()
    for one, its in ((model, optimizer), (twin, twin_optimizer)):
        backward(one, its)
        its.step()
    for ours, its in zip(amp.master_params(optimizer), amp.master_params(twin_optimizer), strict=True):
        assert torch.equal(ours, its)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_models_train_in_threads_as_they_do_alone(opt_level):
    """Each thread has a model, an optimizer and a scaler of its own; all start together."""

    def make(seed):
        torch.manual_seed(seed)
        model = Net("weight")
        return amp.initialize(model, OPTIMIZERS["adam"](model.parameters()), opt_level=opt_level, verbosity=0)

    def some_steps(model, optimizer):
        for _ in range(4):
            train(model, optimizer)

    alone = []
    for seed in range(3):
        model, optimizer = make(seed)
        some_steps(model, optimizer)
        alone.append(list(amp.master_params(optimizer)))
    pairs = [make(seed) for seed in range(3)]
    start, errors = threading.Barrier(len(pairs)), []

    def work(model, optimizer):
        try:
            start.wait()
            some_steps(model, optimizer)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (model, optimizer), expected in zip(pairs, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(amp.master_params(optimizer), expected, strict=True))
        for master in masters_of(model):
            assert torch.equal(master.value.to(master.half.dtype), master.half)
