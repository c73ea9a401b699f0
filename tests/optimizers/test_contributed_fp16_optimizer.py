"""The ``FP16_Optimizer`` of ``apex.contrib.optimizers``, and of ``apex.optimizers`` until 2019: no master gradients."""

import copy
import inspect
import io

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from ampcompat import fp16_utils, optimizers
from ampcompat.contrib import optimizers as contributed
from ampcompat.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD

KEYS = {"dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups"}
OF_DYNAMIC_SCALES = {"last_overflow_iter", "scale_factor", "scale_window"}
INSIDE = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.05),
    "FusedAdam, clipped": lambda params: FusedAdam(params, lr=0.05, max_grad_norm=0.1),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.05),
    "FusedAdam of apex.optimizers": lambda params: optimizers.FusedAdam(params, lr=0.05, max_grad_norm=0.1),
    "torch.optim.Adam": lambda params: torch.optim.Adam(params, lr=0.05),
}
every_inside = pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
HALVES = [torch.float16, torch.bfloat16]


def make_model(dtype=torch.float16):
    """As ``network_to_half`` and BERT leave one: half, with a float32 norm."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3).to(dtype), torch.nn.LayerNorm(3))


def forward(model, step):
    torch.manual_seed(step)
    x = torch.randn(5, 4).to(model[0].weight.dtype)
    return model[1](model[0](x).float()).square().sum() * 0.5 + model[0].weight.float().sum()


def make(inside=INSIDE["FusedAdam"], dtype=torch.float16, **options):
    model = make_model(dtype)
    return model, FP16_Optimizer(inside(model.parameters()), verbose=False, **options)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(forward(model, step))
        optimizer.step()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def masters_of(optimizer):
    return [master for group in optimizer.fp32_groups for master in group]


def test_it_is_a_class_of_its_own_with_apexs_members():
    assert optimizers.FP16_Optimizer is FP16_Optimizer
    assert not issubclass(FP16_Optimizer, fp16_utils.FP16_Optimizer)
    signature = "init_optimizer static_loss_scale=1.0 dynamic_loss_scale=False dynamic_loss_args=None verbose=True"
    parameters = list(inspect.signature(FP16_Optimizer).parameters.values())
    assert " ".join([parameters[0].name, *(f"{p.name}={p.default}" for p in parameters[1:])]) == signature
    assert list(inspect.signature(FP16_Optimizer.backward).parameters) == ["self", "loss"]
    assert list(inspect.signature(FP16_Optimizer.step).parameters) == ["self", "closure"]
    assert inspect.signature(FP16_Optimizer.zero_grad).parameters["set_grads_to_None"].default is True
    for name in ("clip_master_grads", "update_master_grads", "inspect_master_grad_data", "loss_scale", "loss_scaler"):
        assert not hasattr(FP16_Optimizer, name)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@every_inside
def test_it_trains_as_a_loop_by_hand(inside, dtype):
    model, optimizer = make(inside, dtype, static_loss_scale=64.0)
    by_hand = make_model(dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in by_hand.parameters()]
    other = inside(masters)
    for step in range(4):
        train(model, optimizer, [step])
        by_hand.zero_grad()
        (forward(by_hand, step) * 64).backward()
        for master, p in zip(masters, by_hand.parameters(), strict=True):
            master.grad = p.grad.float() / 64
        other.step()
        with torch.no_grad():
            for master, p in zip(masters, by_hand.parameters(), strict=True):
                p.copy_(master)
        # The clip of the contributed class is a factor of the scale, and rounded otherwise.
        torch.testing.assert_close(masters_of(optimizer), masters, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            list(model.parameters()), [p.to(q.dtype) for p, q in zip(masters, model.parameters())]
        )
    assert all(master.grad is None for master in masters_of(optimizer))
    assert all(p.grad is not None for p in model.parameters())


class OpenNMT:
    """``onmt/utils/optimizers.py: Optimizer``, with ``_fp16 = "legacy"``: it asks what the optimizer can do."""

    def __init__(self, optimizer, max_grad_norm):
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm

    def backward(self, loss):
        options = {}
        if "update_master_grads" in inspect.getfullargspec(self._optimizer.backward).args:
            options["update_master_grads"] = True
        self._optimizer.backward(loss, **options)

    def step(self, learning_rate):
        if hasattr(self._optimizer, "update_master_grads"):
            self._optimizer.update_master_grads()
        if hasattr(self._optimizer, "clip_master_grads") and self._max_grad_norm > 0:
            self._optimizer.clip_master_grads(self._max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()


def test_opennmt_trains_without_a_clip_as_under_apex():
    model, optimizer = make(static_loss_scale=64.0)
    twin, plain = make(static_loss_scale=64.0)
    wrapped = OpenNMT(optimizer, max_grad_norm=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        wrapped.backward(forward(model, step))
        wrapped.step(0.05)
        train(twin, plain, [step])
    assert same(model.parameters(), twin.parameters())


@pytest.mark.parametrize("home", [optimizers, contributed], ids=["apex.optimizers", "apex.contrib.optimizers"])
@pytest.mark.parametrize("loss_scale", [0, 128.0])
def test_the_bert_examples_of_early_2019(home, loss_scale):
    """``run_squad.py`` and the hundreds of copies of it: ``FusedAdam`` of either home, groups without decay, warmup."""
    model = make_model()
    groups = [{"params": [model[0].weight], "weight_decay": 0.01}, {"params": [model[0].bias], "weight_decay": 0.0}]
    groups[1]["params"] += list(model[1].parameters())
    optimizer = home.FusedAdam(groups, lr=3e-2, bias_correction=False, max_grad_norm=2**-8)
    if loss_scale == 0:
        optimizer = optimizers.FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    else:
        optimizer = optimizers.FP16_Optimizer(optimizer, static_loss_scale=loss_scale)
    by_hand = make_model()
    masters = [torch.nn.Parameter(p.detach().float()) for p in by_hand.parameters()]
    groups = [{"params": masters[:1], "weight_decay": 0.01}, {"params": masters[1:], "weight_decay": 0.0}]
    other = home.FusedAdam(groups, lr=3e-2, bias_correction=False)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 * (step + 1) / 4
        scale = optimizer.cur_scale
        optimizer.backward(forward(model, step) * 2**-10)
        optimizer.step()
        optimizer.zero_grad()
        by_hand.zero_grad()
        (forward(by_hand, step) * 2**-10 * scale).backward()
        for master, p in zip(masters, by_hand.parameters(), strict=True):
            master.grad = p.grad.float() / scale
        for group in other.param_groups:
            clip_grad_norm_(group["params"], 2**-8)
            group["lr"] = 3e-2 * (step + 1) / 4
        other.step()
        with torch.no_grad():
            for master, p in zip(masters, by_hand.parameters(), strict=True):
                p.copy_(master)
        # The clip of the contributed class is a factor of the scale, and rounded otherwise.
        torch.testing.assert_close(masters_of(optimizer), masters, rtol=1e-5, atol=1e-6)
    assert optimizer.cur_iter == 4
    assert optimizer.last_overflow_iter == -1


def test_overflows_at_a_dynamic_scale(capsys):
    model, optimizer = make(dynamic_loss_scale=True)
    optimizer.verbose = True
    before = [p.detach().clone() for p in model.parameters()]
    scales = []
    for _ in range(18):
        optimizer.zero_grad()
        optimizer.backward(forward(model, 0) * float("inf"))
        optimizer.step()
        scales.append(optimizer.cur_scale)
    assert scales == [max(2.0 ** (15 - number), 1.0) for number in range(18)]
    assert same(model.parameters(), before)
    assert not optimizer.state
    out = capsys.readouterr().out
    assert out.startswith("Grad overflow on iteration 0\nUsing dynamic loss scale of 65536.0\n")
    assert out.count("Grad overflow") == 18
    assert (optimizer.cur_iter, optimizer.last_overflow_iter) == (18, 17)
    optimizer.cur_iter = 1016
    train(model, optimizer, [0])
    assert optimizer.cur_scale == 1.0
    train(model, optimizer, [1])
    assert optimizer.cur_scale == 2.0


def test_overflows_at_a_static_scale_are_skipped_too(capsys):
    model, optimizer = make(static_loss_scale=8.0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(forward(model, 0) * float("nan"))
    optimizer.step()
    assert same(model.parameters(), before)
    assert optimizer.cur_scale == 8.0
    assert capsys.readouterr().out == "Grad overflow on iteration 0\nUsing static loss scale of 8.0\n"


def test_parameters_without_gradients_and_empty_groups_are_left_alone():
    model = make_model()
    inside = FusedAdam([{"params": []}, {"params": list(model.parameters())}], lr=0.05, max_grad_norm=1.0)
    optimizer = FP16_Optimizer(inside, verbose=False)
    optimizer.backward(model[0].weight.float().sum())
    before = model[0].bias.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].bias, before)
    assert len(optimizer.state) == 1


def test_gradients_are_cleared_to_none_or_to_zero():
    model, optimizer = make()
    optimizer.backward(forward(model, 0))
    optimizer.zero_grad(set_grads_to_None=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# -- checkpoints -------------------------------------------------------------------------------------------------------
def through_a_file(saved):
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_inside
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(inside, dynamic):
    options = {"dynamic_loss_scale": True} if dynamic else {"static_loss_scale": 64.0}
    model, optimizer = make(inside, **options)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    assert saved.keys() == KEYS | (OF_DYNAMIC_SCALES if dynamic else set())
    saved = through_a_file({"model": model.state_dict(), "optimizer": saved})
    resumed, other = make(inside)
    other.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    train(model, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    assert same(model.parameters(), resumed.parameters())
    assert same(masters_of(optimizer), masters_of(other))
    numbers = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "dynamic_loss_scale")
    assert all(getattr(optimizer, name) == getattr(other, name) for name in numbers)


def flattened(saved):
    """As apex saved until December 2019: one flat master a group, and its state."""
    inner = saved["optimizer_state_dict"]
    states = {}
    for number, group in enumerate(inner["param_groups"]):
        of_params = [inner["state"][key] for key in group["params"]]
        states[number] = {
            name: torch.cat([state[name].flatten() for state in of_params]) if name != "step" else of_params[0]["step"]
            for name in of_params[0]
        }
    groups = [{**group, "params": [number]} for number, group in enumerate(inner["param_groups"])]
    flat = [torch.cat([master.flatten() for master in group]) for group in saved["fp32_groups"]]
    rest = {name: value for name, value in saved.items() if name != "fp32_groups"}
    return {**rest, "optimizer_state_dict": {"state": states, "param_groups": groups}, "fp32_groups_flat": flat}


def as_version_010_saved(saved, model):
    """0.1.0 had :class:`fp16_utils.FP16_Optimizer` here, around ``optimizers.FusedAdam``, and its older scaler."""
    inner = copy.deepcopy(saved["optimizer_state_dict"])
    for group in inner["param_groups"]:
        group.pop("max_grad_norm", None)
        steps = [inner["state"][key].pop("step") for key in group["params"] if "step" in inner["state"][key]]
        if steps:
            group["step"] = steps[0]
    scaler = fp16_utils.DynamicLossScaler(init_scale=saved["cur_scale"])
    scaler.cur_iter = saved["cur_iter"]
    return {
        "loss_scaler": dict(vars(scaler)),
        "dynamic_loss_scale": True,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": inner,
        "fp32_from_fp16": [
            [m for m, p in zip(saved["fp32_groups"][0], model.parameters()) if p.dtype != torch.float32]
        ],
    }


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("form", ["flat", "of 0.1.0"])
def test_older_files_load(name, form):
    inside = INSIDE[name]
    model, optimizer = make(inside, dynamic_loss_scale=True)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    older = flattened(saved) if form == "flat" else as_version_010_saved(saved, model)
    resumed, other = make(inside)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(older))
    train(model, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    assert same(model.parameters(), resumed.parameters())
    assert same(masters_of(optimizer), masters_of(other))
    assert other.state_dict().keys() == KEYS | OF_DYNAMIC_SCALES
    assert (other.cur_scale, other.cur_iter) == (optimizer.cur_scale, optimizer.cur_iter)


def of_another_model():
    model = torch.nn.Linear(2, 2).half()
    return FP16_Optimizer(FusedAdam(model.parameters()), verbose=False).state_dict()


def of_fp16_utils():
    sgd = torch.optim.SGD(make_model().parameters(), lr=0.1)
    return fp16_utils.FP16_Optimizer(sgd, dynamic_loss_scale=True, verbose=False).state_dict()


def of_another_optimizer():
    return make(INSIDE["FusedSGD"])[1].state_dict()


@pytest.mark.parametrize(
    ("make_saved", "match"),
    [
        (of_another_model, "got masters with the shapes .* - they must match"),
        (lambda: flattened_of(of_another_model()), r"with the sizes \[6\], where there are \[21\]"),
        (of_fp16_utils, "fp16_utils.FP16_Optimizer - this is"),
        (of_another_optimizer, "FusedSGD or torch.optim.SGD"),
        (lambda: {"model": {}, "optimizer": {}}, r"got a dict of \['model', 'optimizer'\] - a checkpoint has"),
    ],
)
def test_other_files_are_refused_before_anything_changes(make_saved, match):
    model, optimizer = make(dynamic_loss_scale=True)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(make_saved())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def flattened_of(saved):
    flat = [torch.cat([master.flatten() for master in group]) for group in saved["fp32_groups"]]
    return {**{name: value for name, value in saved.items() if name != "fp32_groups"}, "fp32_groups_flat": flat}


def test_fp16_utils_names_this_class_for_its_files():
    optimizer = fp16_utils.FP16_Optimizer(torch.optim.SGD(make_model().parameters(), lr=0.1), verbose=False)
    with pytest.raises(ValueError, match=r"FP16_Optimizer of apex.contrib.optimizers"):
        optimizer.load_state_dict(make()[1].state_dict())


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_bad_arguments_are_refused_before_anything_changes():
    model = make_model()
    inside = FusedAdam(model.parameters())
    with pytest.raises(ValueError, match=r"dynamic_loss_args=.* takes none, as in apex"):
        FP16_Optimizer(inside, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 500})
    with pytest.raises(TypeError, match="wraps a torch optimizer"):
        FP16_Optimizer(model)
    assert [id(p) for p in inside.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    with pytest.raises(TypeError, match="only float16, bfloat16 and float32"):
        FP16_Optimizer(FusedAdam(make_model(torch.float64).parameters()))


def test_a_closure_is_refused():
    _, optimizer = make()
    with pytest.raises(RuntimeError, match="takes none, as in apex"):
        optimizer.step(lambda: None)
