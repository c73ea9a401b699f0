"""What a script sees of the class of an initialized model, and of its forward, is the model's own."""

import copy
import functools
import inspect
import io
import pickle
import sys

import pytest
import torch
from nets import CAST_LEVELS, LEVELS, Net
from torch import fx, nn

from ampcompat import amp

pytestmark = pytest.mark.torch


def initialized(model, level):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


# -- super(self.__class__, self) ---------------------------------------------------------------------------------------
class Parent(Net):
    def train(self, mode=True):
        self.was_trained = mode
        return super().train(mode)


class ByInstance(Parent):
    """Written as in Python 2: right as long as nobody derives from it."""

    def train(self, mode=True):
        return super(self.__class__, self).train(mode)  # noqa: UP008

    def forward(self, x):
        return super(self.__class__, self).forward(x) * 2  # noqa: UP008

    def state_dict(self, *args, **kwargs):
        return super(self.__class__, self).state_dict(*args, **kwargs)  # noqa: UP008


@pytest.mark.parametrize("level", LEVELS)
def test_super_of_the_class_of_self(level):
    torch.manual_seed(0)
    model, optimizer = initialized(ByInstance(), level)
    x = torch.randn(8, 4)
    assert model.train().was_trained
    plain = Net()
    plain.load_state_dict(model.state_dict())
    with amp.disable_casts():
        assert torch.allclose(model(x).float(), 2 * plain(x), atol=0.1)
    assert model.state_dict().keys() == Net().state_dict().keys()
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_the_class_is_the_models_own():
    model, _ = initialized(Net(), "O2")
    assert model.__class__ is Net
    assert isinstance(model, Net)
    assert pickle.loads(pickle.dumps(model)).__class__ is Net


class Other(Net):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_another_class_keeps_amp(level):
    """A script that changes the class of a model, as torch's own ``fully_shard`` does, keeps casts and policy."""
    model, _ = initialized(Net(), level)
    x = torch.randn(8, 4)
    before = model(x)
    model.__class__ = Other
    assert model.__class__ is Other
    assert model(x).dtype == before.dtype
    assert torch.allclose(model(x), before + 1, atol=1e-2)


class OwnRecipe(Net):
    """The recipe for ``__deepcopy__`` that many answers give."""

    def __deepcopy__(self, memo):
        cls = self.__class__
        made = cls.__new__(cls)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            setattr(made, name, copy.deepcopy(value, memo))
        return made


@pytest.mark.parametrize("level", LEVELS)
def test_a_deepcopy_by_the_usual_recipe(level):
    model, _ = initialized(OwnRecipe(), level)
    clone = copy.deepcopy(model.eval())
    x = torch.randn(8, 4)
    assert torch.equal(clone(x), model(x))
    assert clone(x).dtype == model(x).dtype
    assert {value.dtype for value in clone.state_dict().values()} == {torch.float32, torch.int64}


# -- what introspection shows ------------------------------------------------------------------------------------------
class Named(nn.Linear):
    def forward(self, tokens, mask=None, *rest, scale: float = 1.0, **more):
        return super().forward(tokens) * scale


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_parameters_of_forward_are_the_models(level):
    plain = Named(4, 4)
    model, _ = initialized(Named(4, 4), level)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.getfullargspec(model.forward) == inspect.getfullargspec(plain.forward)
    code = model.forward.__code__
    assert code.co_varnames[: code.co_argcount + 1] == ("self", "tokens", "mask", "scale")
    assert code.co_argcount == plain.forward.__code__.co_argcount
    assert model(torch.ones(1, 4), scale=2.0).shape == (1, 4)
    assert model(torch.ones(1, 4), None, 1, scale=2.0, other=3).shape == (1, 4)
    with pytest.raises(TypeError, match="forward"):
        model()


# -- fx.GraphModule ----------------------------------------------------------------------------------------------------
class WithOwnParameter(Net):
    """Its graph reads a parameter of the root."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((2,), 1.5))

    def forward(self, x):
        return super().forward(x) * self.gain


def recompiled(model):
    model.recompile()
    return model


def by_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, recompiled, by_file, lambda model: copy.deepcopy(copy.deepcopy(model))]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "recompile", "save", "twice"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_module(level, way):
    torch.manual_seed(0)
    model, optimizer = initialized(fx.symbolic_trace(WithOwnParameter()), level)
    x = torch.randn(8, 4)
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    model.eval()
    want = model(x)
    made = way(model)
    assert isinstance(made, fx.GraphModule)
    assert torch.equal(made(x), want)
    assert made(x).dtype == want.dtype
    saved = model.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in made.state_dict().items())
    assert {value.dtype for value in made.state_dict().values()} <= {torch.float32, torch.int64}
    assert torch.equal(model(x), want)
    if made is not model and level in CAST_LEVELS:
        with torch.no_grad():
            made.gain.mul_(2)
        assert torch.equal(model(x), want)


def test_a_changed_graph_keeps_its_casts():
    model, _ = initialized(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), "O2")
    x = torch.randn(2, 4)
    for node in model.graph.nodes:
        if node.target == "1":
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)
            break
    model.recompile()
    assert (model(x) < 0).any()
    assert model(x).dtype == torch.float32


# -- ONNX ------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")  # the exporter is deprecated, in several ways
@pytest.mark.parametrize("level", LEVELS)
def test_the_exporter_of_torchscript_finds_the_tensors_that_the_forward_reads(level):
    model, _ = initialized(Net(), level)
    file = io.BytesIO()
    exporter = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    try:
        torch.onnx.export(model.eval(), torch.randn(2, 4), file, **exporter)
    except torch.onnx.errors.OnnxExporterError as error:  # the graph is made, and cannot be written
        if "Module onnx is not installed" not in str(error):
            raise
    assert {value.dtype for value in model.state_dict(keep_vars=True).values()} == {torch.float32, torch.int64}


# -- kinds of forward --------------------------------------------------------------------------------------------------
def doubled(x, scale: float = 2.0):
    return x * scale


class Helper:
    def double(self, x, scale: float = 2.0):
        return x * scale


class Callable:
    def __call__(self, x, scale: float = 2.0):
        return x * scale


class OfClass(nn.Linear):
    factor = 2.0

    @classmethod
    def forward(cls, x, scale: float = 1.0):
        assert cls is OfClass
        return x * cls.factor * scale


def scaled_by(self, x, scale: float = 1.0):
    return x * scale + 0 * self.weight.sum()


class Dispatching(nn.Linear):
    @functools.singledispatchmethod
    def forward(self, x, scale: float = 2.0):
        return x * scale + 0 * self.weight.sum()


class PartialMethod(nn.Linear):
    def scaled(self, scale, x):
        return x * scale + 0 * self.weight.sum()

    forward = functools.partialmethod(scaled, 2.0)


def kind_of_forward(forward):
    return type("Kind", (nn.Linear,), {"forward": forward})


KINDS = {
    "staticmethod": kind_of_forward(staticmethod(doubled)),
    "classmethod": OfClass,
    "bound method": kind_of_forward(Helper().double),
    # From Python 3.14 on, a class binds a partial to its instances as it does a function.
    "partial": kind_of_forward(functools.partial(scaled_by if sys.version_info >= (3, 14) else doubled, scale=2.0)),
    "staticmethod of a partial": kind_of_forward(staticmethod(functools.partial(doubled, scale=2.0))),
    "callable": kind_of_forward(Callable()),
    "builtin": kind_of_forward(torch.relu),
    "partialmethod": PartialMethod,
    "singledispatchmethod": Dispatching,
    "inherited": type("Child", (kind_of_forward(staticmethod(doubled)),), {}),
}


@pytest.mark.filterwarnings("ignore:functools.partial will be a method descriptor:FutureWarning")  # Python 3.13
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_of_any_kind_is_bound_as_plain_torch_binds_it(kind, level):
    plain, model = KINDS[kind](2, 2), KINDS[kind](2, 2)
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    x = torch.tensor([[1.0, 2.0]])
    for out in (model(x), model.forward(x), copy.deepcopy(model)(x)):
        assert torch.equal(out, plain(x))
        assert out.dtype == torch.float32


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("partialmethod", "singledispatchmethod")])
def test_a_forward_of_another_kind_is_compiled_whole(kind):
    """Two kinds are left out: the compiler does not take a plain module of them whole either."""
    model = amp.initialize(KINDS[kind](2, 2), opt_level="O2", verbosity=0)
    x = torch.tensor([[1.0, 2.0]])
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
