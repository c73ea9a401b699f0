"""Where amp must do nothing it does nothing, bit for bit; and undo leaves torch as it was."""

import law_profiles  # noqa: F401 - loads the profile
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from internals import reset

from ampcompat import amp

pytestmark = pytest.mark.torch

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
LAYERS = ["linear", "batchnorm", "layernorm", "relu", "tanh", "dropout", "tied"]


@st.composite
def recipes(draw):
    return {
        "layers": draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4)),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "frozen": draw(st.booleans()),
        "accumulate": draw(st.integers(1, 3)),
        "steps": draw(st.integers(1, 3)),
        "clip": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def build(recipe):
    torch.manual_seed(recipe["seed"])
    tied = torch.nn.Linear(4, 4)
    make = {
        "linear": lambda: torch.nn.Linear(4, 4),
        "batchnorm": lambda: torch.nn.BatchNorm1d(4),
        "layernorm": lambda: torch.nn.LayerNorm(4),
        "relu": torch.nn.ReLU,
        "tanh": torch.nn.Tanh,
        "dropout": lambda: torch.nn.Dropout(0.3),
        "tied": lambda: tied,
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *[make[name]() for name in recipe["layers"]])
    if recipe["frozen"]:
        model[0].weight.requires_grad_(False)
    return model, OPTIMIZERS[recipe["optimizer"]](model.parameters())


def train(recipe, model, optimizer, backward):
    torch.manual_seed(recipe["seed"] + 1)
    for _ in range(recipe["steps"]):
        for _ in range(recipe["accumulate"]):
            backward(torch.nn.functional.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 4)))
        if recipe["clip"]:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [t.clone() for t in (*model.parameters(), *model.buffers())]


def same(left, right):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


WITHOUT_HALF = [
    {"enabled": False},
    {"opt_level": "O0"},
    {"opt_level": "O0", "loss_scale": 128.0},
    {"opt_level": "O1", "patch_torch_functions": False},
    {"opt_level": "O2", "cast_model_type": False},
]


@given(recipe=recipes(), keywords=st.sampled_from(WITHOUT_HALF))
def test_without_half_it_is_plain_pytorch(recipe, keywords):
    """Powers of two scale without rounding."""
    reset()  # of the example before, whose casts are for the process
    plain = train(recipe, *build(recipe), torch.Tensor.backward)
    reset()
    model, optimizer = amp.initialize(*build(recipe), verbosity=0, **keywords)

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    assert same(train(recipe, model, optimizer, backward), plain)
    assert amp.state_dict() == ({} if "enabled" in keywords else {"loss_scaler0": amp.state_dict()["loss_scaler0"]})


@given(recipe=recipes(), opt_level=st.sampled_from(["O0", "O1", "O2", "O3", "O4", "O5"]))
def test_after_a_reset_torch_is_plain_again(recipe, opt_level):
    plain = train(recipe, *build(recipe), torch.Tensor.backward)
    amp.initialize(*build(recipe), opt_level=opt_level, verbosity=0)
    reset()
    assert same(train(recipe, *build(recipe), torch.Tensor.backward), plain)
