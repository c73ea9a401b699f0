"""Modules that stay float32 inside a model that runs in half."""

import copy
import io
import pickle

import pytest
import torch
from internals import has_policy
from o1_casts import here
from seeded import seeded
from torch import nn

from ampcompat import amp
from ampcompat.amp.half.boundary import BoundaryPolicy


class Probe(nn.Linear):
    """A linear layer that notes what its forward saw."""

    def forward(self, x):
        out = super().forward(x)
        self.seen = (x.dtype, self.weight.dtype, out.dtype, torch.is_autocast_enabled("cpu"))
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.wide = Probe(16, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.wide(torch.relu(self.first(x)))
        self.after = x.dtype
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(level, keep="wide", **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, keep_fp32=keep, verbosity=0, **options)


def train(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.randn(6, 8, generator=seeded(step))
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    ("level", "outside"),
    [
        ("O0", torch.float32),
        ("O1", torch.float32),
        ("O2", torch.float16),
        ("O3", torch.float16),
        ("O4", torch.float32),
        ("O5", torch.bfloat16),
    ],
)
def test_a_kept_module_computes_in_float32_at_every_level(level, outside):
    model, optimizer = build(level)
    train(model, optimizer)
    assert model.wide.seen == (torch.float32, torch.float32, torch.float32, False)
    assert model.after == outside
    assert model.first.weight.dtype == (outside if level in ("O2", "O3", "O5") else torch.float32)


@pytest.mark.parametrize("keep", ["wide", "wi*", "Probe", Probe, ["wide"], ("wide", "wide")])
def test_ways_to_name_a_module(keep):
    model, _ = build("O2", keep)
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {"wide.weight", "wide.bias"}


def test_a_module_object_and_a_set():
    for pick in (lambda m: m.wide, lambda m: {m.wide}):
        model = Net()
        model = amp.initialize(model, opt_level="O2", keep_fp32=pick(model), verbosity=0)
        assert model.wide.weight.dtype == torch.float32
        assert model.first.weight.dtype == torch.float16


def test_the_environment_adds_patterns(monkeypatch, capsys):
    monkeypatch.setenv("AMPCOMPAT_KEEP_FP32", "last, nowhere*")
    model, _ = build("O2")
    assert model.last.weight.dtype == model.wide.weight.dtype == torch.float32
    said = capsys.readouterr().out
    assert "'last' keeps last in float32" in said
    assert "'nowhere*' matches no module of this model, which has blocks, blocks.0" in said


def test_the_overflow_of_a_kept_module_stays_finite_at_o1():
    outputs = {}
    for keep in (None, "wide"):
        model, _ = build("O1", keep)
        with torch.no_grad():
            model.wide.weight.fill_(1e4)
            wide = []
            handle = model.wide.register_forward_hook(lambda m, i, o, wide=wide: wide.append(o))
            model(torch.full((2, 8), 10.0))
            handle.remove()
        outputs[keep] = bool(wide[0].isfinite().all())
    assert outputs == {None: False, "wide": True}


def test_an_integer_input_comes_back_in_half():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 2))
    model = amp.initialize(model, opt_level="O3", keep_fp32=nn.Embedding, verbosity=0)
    assert model[0].weight.dtype == torch.float32
    assert model(torch.tensor([1, 2])).isfinite().all()


def test_float32_code_outside_gets_float32_back():
    model, _ = build("O2")
    assert model.wide(torch.ones(2, 16)).dtype == torch.float32


def test_containers_are_kept_through_what_they_hold():
    model, optimizer = build("O2", "blocks")
    assert [b.weight.dtype for b in model.blocks] == [torch.float32, torch.float32]
    train(model, optimizer)


def test_kept_weights_have_no_master():
    """The optimizer holds the kept weight itself; checkpoints hold all weights in float32."""
    model, optimizer = build("O2")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert any(p is model.wide.weight for p in held)
    assert not any(p is model.first.weight for p in held)
    train(model, optimizer)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    assert {v.dtype for v in saved.values()} == {torch.float32}
    other, _ = build("O2")
    other.load_state_dict(saved)
    assert all(torch.equal(v, saved[k]) for k, v in other.state_dict().items())
    assert torch.equal(other.wide.weight, saved["wide.weight"])


def test_kept_batchnorm_off_and_a_kept_module_together():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    model = amp.initialize(model, opt_level="O2", keep_batchnorm_fp32=False, keep_fp32="2", verbosity=0)
    assert [m.weight.dtype for m in model] == [torch.float16, torch.float16, torch.float32]
    assert model(torch.randn(2, 1, 8, 8)).isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_keep_their_boundary(level):
    model, optimizer = build(level)
    train(model, optimizer)
    x = torch.randn(3, 8)
    want = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(twin(x), want)
        assert twin.wide.seen == (torch.float32, torch.float32, torch.float32, False)
        assert isinstance(twin.wide, Probe)
        with torch.no_grad():
            twin.wide.weight.zero_()  # the copy's own weights
        assert not torch.equal(twin(x), want)
    assert torch.equal(model(x), want)


def test_a_direct_call_of_forward_passes_the_boundary():
    model, _ = build("O2")
    assert model.wide.forward(torch.ones(2, 16, dtype=torch.half)).dtype == torch.float16


def test_an_exception_inside_leaves_casts_on():
    model, _ = build("O1")
    with pytest.raises(RuntimeError):
        model.wide(torch.ones(2, 3))
    assert torch.is_autocast_enabled(here())


def test_initialized_again_without_it():
    model, optimizer = build("O2")
    train(model, optimizer)
    before = model.wide.weight.detach().clone()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.wide.weight.dtype == torch.float16
    assert torch.equal(model.state_dict()["wide.weight"], before)
    assert not any(isinstance(m.__dict__.get("_amp_policy"), BoundaryPolicy) for m in model.modules())
    train(model, optimizer)


def test_initialized_again_with_it_restores_the_masters_value():
    model, optimizer = build("O2", None)
    train(model, optimizer)
    exact = model.state_dict()["wide.weight"].clone()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", keep_fp32="wide", verbosity=0)
    assert torch.equal(model.wide.weight, exact)
    assert any(p is model.wide.weight for group in optimizer.param_groups for p in group["params"])
    train(model, optimizer)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


def test_a_tied_weight_keeps_both_its_modules(capsys):
    model = amp.initialize(Tied(), opt_level="O2", keep_fp32="head", verbosity=0)
    assert "'embed' shares a tensor with 'head' and stays float32 with it" in capsys.readouterr().out
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.dtype == torch.float32
    assert model.middle.weight.dtype == torch.float16
    model(torch.tensor([1, 2])).sum().backward()
    assert model.embed.weight.grad.isfinite().all()


def test_what_cannot_be_kept_is_refused_before_anything_changes():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    for keep, error, words in [
        ("decoder.*", ValueError, "matches no module of the model - modules are named 0, 0.out_proj, 1;"),
        (nn.Linear(1, 1), ValueError, "Linear - it matches no module"),
        (nn.Conv2d, ValueError, "matches no module"),
        ("0.out_proj", ValueError, "keep the whole of '0'"),
        (nn.Sequential, ValueError, "opt_level='O0'"),
        (3, TypeError, "got 3 - it takes modules, module types and name patterns"),
        (torch.float32, TypeError, "takes modules"),
    ]:
        with pytest.raises(error, match=words.replace("*", r"\*").replace("(", r"\(")):
            amp.initialize(model, opt_level="O2", keep_fp32=keep, verbosity=0)
    assert type(model) is nn.Sequential
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_cannot_be_kept():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Tanh()))
    with pytest.raises(ValueError, match="keeps '1', a ScriptModule - it runs as scripted"):
        amp.initialize(model, opt_level="O1", keep_fp32="1", verbosity=0)


@pytest.mark.parametrize(("layers", "end"), [(20, ", 8, 9; "), (22, ", 6, 7 and 2 more; ")])
def test_at_most_twenty_modules_are_named(layers, end):
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(layers)])
    with pytest.raises(ValueError, match=f"modules are named 0, 1, 10, 11, .*{end}"):
        amp.initialize(model, opt_level="O2", keep_fp32="head", verbosity=0)


def test_a_call_that_failed_has_its_boundaries_once_it_is_made_again(monkeypatch):
    from ampcompat.amp import session_objects

    def fail(*_):
        raise MemoryError

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with monkeypatch.context() as patch:
        patch.setattr(session_objects, "attach", fail)
        with pytest.raises(MemoryError):
            amp.initialize(model, optimizer, opt_level="O2", keep_fp32="wide", verbosity=0)
    amp.initialize(model, optimizer, opt_level="O2", keep_fp32="wide", verbosity=0)
    assert has_policy(model.wide)
    assert len(model.wide._forward_pre_hooks) == 1
    assert model.wide.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "kept", ["1", pytest.param("1.linear2", marks=pytest.mark.divergence("kept-part-of-encoder-layer-torch24"))]
)
def test_an_encoder_layer_in_eval(kept):
    """The whole layer is kept, or a part of it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), layer)
    model = amp.initialize(model, opt_level="O2", keep_fp32=kept, verbosity=0).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 8)).isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_as_eager(level):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = amp.initialize(model, opt_level=level, keep_fp32="2", verbosity=0)
    x = torch.randn(3, 8)
    want = model(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), want)


@pytest.mark.parametrize(("affine", "dtype"), [(True, torch.float32), (False, torch.float16)])
def test_a_batch_norm_is_kept_where_it_has_weights(affine, dtype):
    """As in apex, which cast the statistics of one without."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine))
    model = amp.initialize(model, opt_level="O2", keep_batchnorm_fp32=True, verbosity=0)
    assert model[1].running_mean.dtype == dtype
    assert model(torch.ones(3, 4)).dtype == torch.float32
