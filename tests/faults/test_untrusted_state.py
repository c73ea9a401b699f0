"""Damaged, foreign and hostile state: a clear error, and nothing changed; or it was fine, and is loaded whole."""

import copy
import fnmatch
import math

import pytest
import torch
from amp_training import make_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from internals import reset, view

from ampcompat import amp

quietly = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not torch.is_tensor(value):
        return value
    value = value.detach()
    return f"{value.dtype}{(value.to_dense() if value.is_sparse else value).double().flatten().tolist()}"


def whole_picture(models, optimizers):
    """All that a call of amp may change: casts, classes, weights, masters, gradients, optimizer state, scalers."""
    seen = {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "engine": torch.autograd._engine_run_backward,
        "amp": {name: plain(value) for name, value in view().items()},
        "scalers": amp.state_dict(),
    }
    names = {}
    for number, model in enumerate(models):
        seen[f"{number} modules"] = [(name, type(module).__name__) for name, module in model.named_modules()]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            names[id(tensor)] = f"{number} {name}"
            seen[f"{number} {name}"] = plain(tensor), plain(tensor.grad)
        # Reading it changes nothing: masters agree with the weights.
        seen[f"{number} state"] = {name: plain(value) for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen[f"optimizer {number} params"] = [(names.get(id(p), "a master"), plain(p), plain(p.grad)) for p in params]
        seen[f"optimizer {number} methods"] = sorted(name for name, value in vars(optimizer).items() if callable(value))
        for index, param in enumerate(params):
            held = optimizer.state.get(param, {})
            seen[f"optimizer {number} state of {index}"] = {name: plain(value) for name, value in held.items()}
    return seen


def start(opt_level="O2", **kwargs):
    reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, num_losses=2, **kwargs)
    make_step(optimizer, model(torch.ones(2, 3)).sum())
    optimizer.zero_grad()
    return model, optimizer


class Hostile:
    """Refuses everything it is asked."""

    def _no(self, *_):
        raise OSError("hostile")

    __float__ = __int__ = __str__ = __bool__ = _no

    def __repr__(self):
        return "Hostile()"


class Liar(dict):
    """A dict whose entries are gone when they are asked for."""

    def __getitem__(self, key):
        raise KeyError(key)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.complex_numbers(),
    st.sampled_from(
        [Hostile(), torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor(float("nan")), 10**400, [], {}]
    ),
)
KEYS = st.one_of(
    st.sampled_from(["loss_scaler0", "loss_scaler1", "loss_scaler2", "scale", "_growth_tracker", "model", 0]),
    st.text(max_size=4),
)
PARTS = st.one_of(
    SCALARS,
    st.dictionaries(st.sampled_from(["loss_scale", "unskipped", "x"]), SCALARS, max_size=3),
    st.fixed_dictionaries({"loss_scale": SCALARS, "unskipped": SCALARS}),
    st.fixed_dictionaries({"loss_scale": st.floats(), "unskipped": st.integers(-5, 2**40)}),
    st.just(Liar(loss_scale=1.0, unskipped=0)),
)
STATES = st.one_of(SCALARS, st.lists(PARTS, max_size=2), st.dictionaries(KEYS, PARTS, max_size=4), PARTS)


@quietly
@given(hostile=STATES)
def test_amp_load_state_dict(hostile):
    model, optimizer = start()
    before = whole_picture([model], [optimizer])
    try:
        amp.load_state_dict(hostile)
    except (TypeError, ValueError, RuntimeError) as error:
        text = str(error)
        assert "amp.load_state_dict" in text or "Error(s) in loading state_dict" in text  # noqa: PT017
        assert whole_picture([model], [optimizer]) == before
    else:
        for entry in amp.state_dict().values():
            assert math.isfinite(entry["loss_scale"])
            assert entry["loss_scale"] > 0
            assert entry["unskipped"] >= 0


@quietly
@given(data=st.data())
def test_model_load_state_dict(data):
    """torch reports what does not fit; the masters never part from the model, and nothing half-loaded is hidden."""
    model, optimizer = start()
    good = {k: v.clone() for k, v in model.state_dict().items()}
    bad = {k: v.clone() for k, v in good.items()}
    name = data.draw(st.sampled_from(sorted(k for k in good if "num_batches" not in k)))  # that one may be missing
    for value in bad.values():
        if value.is_floating_point():
            value += 1
    damage = data.draw(st.sampled_from(["missing", "shape", "dtype", "object", "extra", "sparse", "meta", "long"]))
    if damage == "missing":
        del bad[name]
    elif damage == "shape":
        bad[name] = torch.zeros(7, 7)
    elif damage == "dtype":
        bad[name] = torch.full_like(good[name], 1, dtype=torch.int64)
    elif damage == "object":
        bad[name] = data.draw(st.sampled_from(["text", None, 3.0, [1.0], Hostile(), Liar(a=1)]))
    elif damage in ("sparse", "meta"):
        bad[name] = bad[name].to_sparse() if damage == "sparse" else bad[name].to("meta")
    elif damage == "long":
        bad[name] = torch.cat([bad[name], bad[name]])
    else:
        bad["unknown"] = torch.zeros(1)
    if damage == "dtype":
        model.load_state_dict(bad)  # torch casts
    else:
        with pytest.raises(RuntimeError, match="loading state_dict"):
            model.load_state_dict(bad)
    # As in plain torch: what fits is loaded before the rest is reported.
    if damage not in ("dtype", "extra"):
        bad[name] = good[name]
    seen = model.state_dict()
    assert all(torch.equal(seen[k], bad[k].to(seen[k].dtype)) for k in good)
    for value, half in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert torch.equal(value.detach().to(half.dtype), half.detach())


@pytest.mark.parametrize(
    "foreign", [None, 3, "text", [], {}, {"model": {}}, {"loss_scaler0": {}}, Liar(a=1), {1: None}]
)
def test_what_is_no_state_of_a_model_changes_nothing(foreign):
    model, optimizer = start()
    before = whole_picture([model], [optimizer])
    with pytest.raises((TypeError, RuntimeError, KeyError, AttributeError)):  # torch's own
        model.load_state_dict(foreign)
    assert whole_picture([model], [optimizer]) == before


@quietly
@given(data=st.data())
def test_optimizer_load_state_dict(data):
    model, optimizer = start()
    before = whole_picture([model], [optimizer])
    bad = copy.deepcopy(optimizer.state_dict())
    damage = data.draw(st.sampled_from(["groups", "params", "missing", "foreign", "no params", "state"]))
    if damage == "groups":
        bad["param_groups"] = bad["param_groups"] * 2
    elif damage == "params":
        bad["param_groups"][0]["params"] = bad["param_groups"][0]["params"][:-1]
    elif damage == "missing":
        del bad[data.draw(st.sampled_from(["param_groups", "state"]))]
    elif damage == "no params":
        del bad["param_groups"][0]["params"]
    elif damage == "state":
        bad["state"] = data.draw(st.sampled_from([None, [1], "text", 3]))
    else:
        bad = data.draw(
            st.sampled_from([{}, {"model": 1}, amp.state_dict(), None, 3, [], "text", Liar(param_groups=[])])
        )
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):  # torch's own
        optimizer.load_state_dict(bad)
    assert whole_picture([model], [optimizer]) == before


VALUES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=8),
    st.sampled_from(["O1 ", "o1", "01", "O6", "O" * 10_000, "None", "fp16,bf16", "BF16", "\udcff", "O1\n", "\x1b[31m"]),
)
KNOWN = ["O0", "O1", "O2", "O3", "O4", "O5", "float16", "fp16", "half", "bfloat16", "bf16"]


@quietly
@given(name=st.sampled_from(["AMPCOMPAT_OPT_LEVEL", "AMPCOMPAT_DTYPE"]), value=VALUES.filter(lambda v: v not in KNOWN))
def test_environment(name, value):
    reset()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole_picture([model], [optimizer])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        with pytest.raises((RuntimeError, ValueError), match=r"AMPCOMPAT_OPT_LEVEL|AMPCOMPAT_DTYPE"):
            amp.initialize(model, optimizer, verbosity=0)
    assert whole_picture([model], [optimizer]) == before


@quietly
@given(st.one_of(VALUES, st.sampled_from(["*", "**", "[", "[!", "[z-a]", "*a" * 40, ",,,", " , ", "0", "?", "Linear"])))
def test_patterns_from_the_environment(patterns):
    """What matches is kept in float32; what does not is said; a refusal changes nothing."""
    reset()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.MultiheadAttention(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole_picture([model], [optimizer])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPCOMPAT_KEEP_FP32", patterns)
        try:
            amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        except ValueError as error:
            assert "keep_fp32 keeps" in str(error)  # noqa: PT017 - inside of the attention
            assert whole_picture([model], [optimizer]) == before
            return
    words = [word.strip() for word in patterns.split(",")]
    kept = any(fnmatch.fnmatchcase("0", word) or fnmatch.fnmatchcase("Linear", word) for word in words)
    assert model[0].weight.dtype == (torch.float32 if kept else torch.float16)


@pytest.mark.parametrize(("rank", "speaks"), [("", True), ("0", True), ("1", False)])
def test_the_rank_of_the_launcher_speaks(rank, speaks, monkeypatch, capsys):
    """A launcher's template may leave it empty."""
    monkeypatch.setenv("RANK", rank)
    model = torch.nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
    assert ("Selected optimization level O2" in capsys.readouterr().out) is speaks
    assert model.weight.dtype == torch.float16
