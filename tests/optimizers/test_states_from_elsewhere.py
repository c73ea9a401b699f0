"""Saved states of other optimizers: each is continued as its writer would have, or refused before anything changes."""

import copy
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from ampcompat import amp, optimizers
from ampcompat.contrib import optimizers as contributed
from ampcompat.optimizers._saved_forms import READS
from ampcompat.parallel import LARC

# What is read and refused is the same on every device, and an emulated one has no sparse gradients.
pytestmark = pytest.mark.on_cpu

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"
STEPS = 10
SHAPES = [(4, 3), (4,), (2, 2, 2)]


class TransformersAdamW(torch.optim.Optimizer):
    """``transformers/optimization.py: AdamW``: the names that it saves, and its rule."""

    def __init__(self, params, lr):
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "correct_bias": True}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                size = group["lr"] * (1 - 0.999 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-size)


class OfVersion010(contributed.FusedAdam):
    """The contributed FusedAdam of 0.1.0, which was ``ampcompat.optimizers.FusedAdam``."""

    def __new__(cls, params, lr):
        return optimizers.FusedAdam(params, lr=lr)


def sgd(cls):
    return lambda params: cls(params, lr=0.05, momentum=0.9, dampening=0.3)


def plain(cls):
    return lambda params: cls(params, lr=0.05)


PLAIN_TORCH = (
    *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam"),
    *("Adagrad", "Adadelta", "ASGD", "Rprop", "RMSprop"),
)
SOURCES = {
    **{f"torch {name}": plain(getattr(torch.optim, name)) for name in PLAIN_TORCH},
    "torch RMSprop with momentum": lambda params: torch.optim.RMSprop(params, lr=0.05, momentum=0.9),
    "torch SGD": sgd(torch.optim.SGD),
    "transformers AdamW": plain(TransformersAdamW),
    "FusedAdam": plain(optimizers.FusedAdam),
    "FusedAdam of 0.1.0, contributed": plain(OfVersion010),
    "FusedLAMB": plain(optimizers.FusedLAMB),
    "FusedMixedPrecisionLamb": plain(optimizers.FusedMixedPrecisionLamb),
    "FusedNovoGrad": plain(optimizers.FusedNovoGrad),
    "FusedAdagrad": plain(optimizers.FusedAdagrad),
    "FusedSGD": sgd(optimizers.FusedSGD),
    "contributed FusedAdam": plain(contributed.FusedAdam),
    "contributed FusedLAMB": plain(contributed.FusedLAMB),
    "contributed FusedSGD": sgd(contributed.FusedSGD),
    "LARC around FusedSGD": lambda params: LARC(sgd(optimizers.FusedSGD)(params)),
}
TARGETS = {
    **{name: make for name, make in SOURCES.items() if name.partition(" ")[0] not in ("torch", "transformers", "LARC")},
    "LARC around FusedAdam": lambda params: LARC(plain(optimizers.FusedAdam)(params)),
}
del TARGETS["FusedAdam of 0.1.0, contributed"]

ADAMS = (
    *("torch Adam", "torch AdamW", "transformers AdamW"),
    *("FusedAdam", "FusedAdam of 0.1.0, contributed", "contributed FusedAdam"),
)
SGDS = ("torch SGD", "FusedSGD", "contributed FusedSGD", "LARC around FusedSGD")
LAMBS = ("FusedLAMB", "FusedMixedPrecisionLamb", "contributed FusedLAMB")
#: For each target the sources whose step it continues; the rest is refused.
CONTINUED = {
    "FusedAdam": ADAMS,
    "contributed FusedAdam": ADAMS,
    "LARC around FusedAdam": ADAMS,
    "FusedLAMB": LAMBS,
    "FusedMixedPrecisionLamb": LAMBS,
    "contributed FusedLAMB": LAMBS,
    "FusedNovoGrad": ("FusedNovoGrad",),
    "FusedAdagrad": ("torch Adagrad", "FusedAdagrad"),
    "FusedSGD": SGDS,
    "contributed FusedSGD": SGDS,
}
#: The same rules by other kernels, which round otherwise; the contributed Adam corrects the bias of its ``eps``, too.
ROUNDED = {"rtol": 1e-5, "atol": 1e-5}


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_grads(optimizer, params, step):
    inner = getattr(optimizer, "optim", optimizer)
    for number, p in enumerate(params):
        torch.manual_seed(step * 10 + number)
        p.grad = torch.randn(p.shape).to(p.dtype)
        if isinstance(inner, torch.optim.SparseAdam):
            p.grad = p.grad.to_sparse()


def train(optimizer, params, steps):
    for step in steps:
        give_grads(optimizer, params, step)
        optimizer.step()


def trained(make, dtype=torch.float32):
    params = make_params(dtype)
    optimizer = make(params)
    train(optimizer, params, range(STEPS))
    return optimizer, params


def twin(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def by_plain_rule(optimizer):
    """LARC scales gradients before a step; what it wraps is compared."""
    return getattr(optimizer, "optim", optimizer)


def snapshot(optimizer):
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return copy.deepcopy((groups, list(optimizer.state.values())))


def equal(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    return True


PAIRS = [(target, source) for target in TARGETS for source in SOURCES]


@pytest.mark.parametrize(("target", "source"), [(t, s) for t, s in PAIRS if s in CONTINUED[t]])
def test_the_next_step_is_that_of_the_source(target, source):
    theirs, params = trained(SOURCES[source])
    theirs = by_plain_rule(theirs)
    if "contributed" in target + source:  # the contributed Adam decays weights by another rule
        for group in theirs.param_groups:
            group["weight_decay"] = 0.01 if source in LAMBS else 0.0  # without any, one LAMB alone has a trust ratio
    ours = twin(params)
    optimizer = TARGETS[target](ours)
    saved = theirs.state_dict()
    as_saved = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert equal(saved, as_saved)
    for step in range(STEPS, STEPS + 3):
        train(theirs, params, [step])
        train(by_plain_rule(optimizer), ours, [step])
        torch.testing.assert_close(ours, params, **ROUNDED)


@pytest.mark.parametrize(("target", "source"), [(t, s) for t, s in PAIRS if s in CONTINUED[t]])
def test_what_was_converted_is_saved_as_our_own(target, source):
    theirs, params = trained(SOURCES[source])
    optimizer, reference = TARGETS[target](twin(params)), trained(TARGETS[target])[0]
    optimizer.load_state_dict(theirs.state_dict())
    saved, own = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"][0].keys() == own["param_groups"][0].keys()
    assert {frozenset(state) for state in saved["state"].values()} == {frozenset(s) for s in own["state"].values()}


@pytest.mark.rotate(4)
@pytest.mark.parametrize(("target", "source"), [(t, s) for t, s in PAIRS if s not in CONTINUED[t]])
def test_the_rest_is_refused_by_both_names_before_anything_changes(target, source):
    theirs, _ = trained(SOURCES[source])
    optimizer, params = trained(TARGETS[target])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"load_state_dict got the state of .* - it reads that of .* - ") as caught:
        optimizer.load_state_dict(theirs.state_dict())
    message = str(caught.value)
    assert type(by_plain_rule(optimizer)).__name__ in message
    name = type(by_plain_rule(theirs)).__name__
    known = {"FusedMixedPrecisionLamb": "FusedLAMB", "TransformersAdamW": "transformers.AdamW"}
    assert known.get(name, name) in message or "that it does not know" in message
    assert equal(snapshot(optimizer), before)
    train(optimizer, params, [STEPS])


@pytest.mark.cover(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_no_state_yet_is_read_as_state_is(target, source):
    """A file from before the first step: what differs is in the groups alone."""
    theirs, params = SOURCES[source](make_params()), make_params()
    optimizer = TARGETS[target](params)
    saved = by_plain_rule(theirs).state_dict()
    if source not in CONTINUED[target]:
        with pytest.raises(ValueError, match="load_state_dict got the state of"):
            optimizer.load_state_dict(saved)
        return
    optimizer.load_state_dict(saved)
    train(optimizer, params, [0])
    assert optimizer.state_dict()["param_groups"][0]["lr"] == saved["param_groups"][0]["lr"]


#: torch reads of ours what means the same there: an int that a param counts, momentum. Each other one is its KeyError.
READ_BY_TORCH = {
    ("torch Adam", "contributed FusedAdam"),
    ("torch AdamW", "contributed FusedAdam"),
    ("torch SparseAdam", "contributed FusedAdam"),
    ("torch SGD", "FusedSGD"),
    ("torch SGD", "contributed FusedSGD"),
}
OF_TORCH = [name for name in SOURCES if name.startswith("torch")]
OURS = [name for name in TARGETS if not name.startswith("LARC")]


@pytest.mark.rotate(3)
@pytest.mark.parametrize("torchs", OF_TORCH)
@pytest.mark.parametrize("ours", OURS)
def test_torch_continues_our_state_or_raises(torchs, ours):
    """It cannot be changed; what is asked is that no state of ours goes wrong there in silence."""
    optimizer, params = trained(TARGETS[ours])
    theirs = twin(params)
    other = SOURCES[torchs](theirs)
    saved = copy.deepcopy(optimizer.state_dict())  # torch keeps the tensors that it is given
    if (torchs, ours) in READ_BY_TORCH:
        other.load_state_dict(saved)
        train(other, theirs, [STEPS])
        train(optimizer, params, [STEPS])
        torch.testing.assert_close(theirs, params, **ROUNDED)
    elif (torchs, ours) == ("torch RAdam", "contributed FusedAdam"):
        other.load_state_dict(saved)  # as it takes torch's own Adam: the same moments, another rule
        assert other.state[theirs[0]]["step"] == STEPS
    else:
        with pytest.raises((KeyError, AttributeError)):
            load_and_step(other, saved, theirs)


def load_and_step(optimizer, saved, params):
    optimizer.load_state_dict(saved)
    train(optimizer, params, [STEPS])


def section(title):
    return PAGE.read_text().partition(f"### {title}\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize(("torchs", "ours"), [("torch AdamW", "FusedAdam"), ("torch Adagrad", "FusedAdagrad")])
def test_the_pages_lines_take_our_state_to_torch(torchs, ours):
    code = re.findall(r"```python\n(.*?)```", section("Load the state of another optimizer"), re.DOTALL)[-1]
    optimizer, params = trained(TARGETS[ours])
    theirs = twin(params)
    other = SOURCES[torchs](theirs)
    checkpoint = {"optimizer": copy.deepcopy(optimizer.state_dict())}
    exec(code, {"checkpoint": checkpoint, "optimizer": other, "torch": torch})
    for step in range(STEPS, STEPS + 2):
        train(other, theirs, [step])
        train(optimizer, params, [step])
        torch.testing.assert_close(theirs, params, **ROUNDED)


def test_the_page_has_the_table():
    rows = re.findall(r"^\| (`Fused.*?) \| (.*?) \|", section("Load the state of another optimizer"), re.MULTILINE)
    assert {row[0] for row in rows} == {f"`{name}`" for name in READS}
    for names, sources in rows:
        for form in READS[names.strip("`")]:
            for writer in re.findall(r"[\w.]*\.\w+", form.written_by):
                assert writer.removeprefix("apex.").removeprefix("optimizers.") in sources, writer


# -- what a form leaves open -------------------------------------------------------------------------------------------
def refused(optimizer, saved, match):
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert equal(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("target", "source", "option", "value"),
    [
        ("FusedAdam", "torch AdamW", "amsgrad", True),
        ("FusedAdam", "torch AdamW", "maximize", True),
        ("contributed FusedAdam", "torch Adam", "maximize", True),
        ("FusedSGD", "torch SGD", "maximize", True),
        ("FusedAdagrad", "torch Adagrad", "lr_decay", 0.1),
        ("FusedAdagrad", "torch Adagrad", "maximize", True),
        ("FusedAdam", "contributed FusedAdam", "max_grad_norm", 1.0),
    ],
)
def test_options_that_ours_cannot_have_are_refused(target, source, option, value):
    theirs, params = trained(SOURCES[source])
    saved = theirs.state_dict()
    saved["param_groups"][0][option] = value
    refused(TARGETS[target](params), saved, rf"{option}={value}")


def test_a_clip_of_the_contributed_adam_goes_on_where_the_constructor_has_it():
    theirs, params = trained(lambda params: contributed.FusedAdam(params, lr=0.05, max_grad_norm=1.0))
    ours = twin(params)
    optimizer = optimizers.FusedAdam(ours, max_grad_norm=1.0)
    optimizer.load_state_dict(theirs.state_dict())
    train(theirs, params, [STEPS])
    train(optimizer, ours, [STEPS])
    torch.testing.assert_close(ours, params, **ROUNDED)


def test_params_that_counted_otherwise_are_refused_where_groups_count():
    params = make_params()
    theirs = torch.optim.AdamW(params, lr=0.05)
    train(theirs, params, range(2))
    params[0].grad = None
    theirs.step()
    saved = theirs.state_dict()
    refused(optimizers.FusedAdam(params), saved, r"step counts \[2, 3\]")
    contributed.FusedAdam(params).load_state_dict(saved)  # it counts a param, as torch does


@pytest.mark.parametrize("target", ["FusedAdam", "contributed FusedAdam"])
def test_a_file_with_two_counts_is_refused(target):
    """As 0.1.0 wrote it, after it had read a state of torch's Adam and counted from 1 again."""
    theirs, params = trained(SOURCES["torch Adam"])
    saved = theirs.state_dict()
    saved["param_groups"][0].update(step=3, bias_correction=True)
    refused(TARGETS[target](params), saved, "10")


def test_moments_without_a_count_are_refused():
    theirs, params = trained(SOURCES["FusedAdam"])
    saved = theirs.state_dict()
    del saved["param_groups"][0]["step"]
    for target in ("FusedAdam", "contributed FusedAdam"):
        refused(TARGETS[target](params), saved, "count")


@pytest.mark.parametrize("target", ["FusedAdam", "contributed FusedAdam"])
def test_a_count_and_a_learning_rate_may_be_tensors(target):
    """As apex's ``FusedAdam(capturable=True)`` saves them."""
    theirs, params = trained(SOURCES["FusedAdam"])
    saved = copy.deepcopy(theirs.state_dict())
    saved["param_groups"][0].update(step=torch.tensor([STEPS], dtype=torch.int32), lr=torch.tensor(0.05))
    ours = twin(params)
    optimizer = TARGETS[target](ours)
    optimizer.load_state_dict(saved)
    train(theirs, params, [STEPS])
    train(optimizer, ours, [STEPS])
    torch.testing.assert_close(ours, params, **ROUNDED)


def test_each_group_has_its_count_and_its_options():
    def grouped(make, params):
        return make([{"params": params[:1]}, {"params": params[1:], "lr": 0.01}])

    params = make_params()
    theirs = grouped(SOURCES["torch AdamW"], params)
    give_grads(theirs, params, 0)
    theirs.step()
    params[0].grad = None
    theirs.step()
    ours = twin(params)
    optimizer = grouped(lambda groups: optimizers.FusedAdam(groups, bias_correction=False), ours)
    optimizer.load_state_dict(theirs.state_dict())
    counts = [(group["step"], group["lr"], group["bias_correction"]) for group in optimizer.param_groups]
    assert counts == [(1, 0.05, False), (2, 0.01, False)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_moments_of_half_params_become_float32(dtype):
    theirs, params = trained(SOURCES["torch AdamW"], dtype)
    optimizer = optimizers.FusedAdam(params)
    optimizer.load_state_dict(theirs.state_dict())
    for p in params:
        assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], theirs.state[p]["exp_avg_sq"].float())


def test_momentum_that_torch_has_not_made_yet_is_made_at_its_first_step():
    """torch writes None for the buffer of a param whose group had no momentum."""
    params = make_params()
    saved = torch.optim.SGD(params, lr=0.05).state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    saved["param_groups"][0].update(momentum=0.9, dampening=0.5)
    for cls in (optimizers.FusedSGD, contributed.FusedSGD):
        ours, theirs = twin(params), twin(params)
        optimizer, reference = cls(ours, lr=1.0), torch.optim.SGD(theirs, lr=0.05, momentum=0.9, dampening=0.5)
        optimizer.load_state_dict(saved)
        train(reference, theirs, range(2))
        train(optimizer, ours, range(2))
        torch.testing.assert_close(ours, theirs, **ROUNDED)


def test_novograds_of_apex_without_a_norm_for_each_param_are_refused():
    theirs, params = trained(SOURCES["FusedNovoGrad"])
    saved = copy.deepcopy(theirs.state_dict())
    norms = [saved["state"][i].pop("exp_avg_sq") for i in range(3)]
    saved["param_groups"][0]["exp_avg_sq"] = [torch.zeros(0), torch.stack(norms[:2])]
    refused(TARGETS["FusedNovoGrad"](params), saved, "2 norms for 3 params")


def test_novograds_norms_belong_to_the_params_that_had_gradients():
    params = make_params()
    theirs = optimizers.FusedNovoGrad(params, lr=0.05)
    for step in range(2):
        give_grads(theirs, params, step)
        params[1].grad = None
        theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    norms = [saved["state"][i].pop("exp_avg_sq") for i in (0, 2)]
    saved["param_groups"][0]["exp_avg_sq"] = [None, torch.stack(norms)]
    ours = twin(params)
    optimizer = optimizers.FusedNovoGrad(ours, lr=0.05)
    optimizer.load_state_dict(saved)
    for optimizer, trained_params in ((theirs, params), (optimizer, ours)):
        give_grads(optimizer, trained_params, 2)
        trained_params[1].grad = None
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, params, strict=True))


# -- as scripts meet it ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_hf_resumes_adamw_torch_with_adamw_apex_fused(opt_level):
    """``--optim adamw_apex_fused`` in place of ``adamw_torch``: the checkpoint is the other one's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    twin_model = copy.deepcopy(model)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(STEPS):
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        theirs.step()
    twin_model.load_state_dict(model.state_dict())
    optimizer = optimizers.FusedAdam(twin_model.parameters(), lr=0.01)
    twin_model, optimizer = amp.initialize(twin_model, optimizer, opt_level=opt_level, loss_scale=1.0, verbosity=0)
    optimizer.load_state_dict(theirs.state_dict())
    torch.manual_seed(STEPS)
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        p.grad = torch.randn_like(p)
        master.grad = p.grad.clone()
    theirs.step()
    optimizer.step()
    torch.testing.assert_close(list(amp.master_params(optimizer)), list(model.parameters()), **ROUNDED)


def test_a_subclass_with_names_of_its_own_reads_what_it_wrote():
    class Averaging(optimizers.FusedAdam):
        def step(self, closure=None):
            super().step(closure)
            for p in make_list(self):
                self.state[p]["average"] = p.detach().clone()

    def make_list(optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    first, params = trained(lambda params: Averaging(params, lr=0.05))
    first.param_groups[0]["initial_lr"] = 0.05
    second = Averaging(twin(params), lr=0.05)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["initial_lr"] == 0.05
    assert all(torch.equal(second.state[p]["average"], p) for p in make_list(second))


def test_every_row_of_the_table_is_met():
    assert Counter(len(sources) for sources in CONTINUED.values())[6] == 3
    assert set(READS) <= {name.rpartition(" ")[2] for name in CONTINUED}
