import copy
import importlib
import importlib.util
import sys

import pytest
import torch
from internals import reset

from ampcompat import install_as_apex

PACKAGES = ["contrib", "RNN", "mlp", "transformer", "fused_dense", "reparameterization", "pyprof"]


STATEMENTS = [
    ("from ampcompat.contrib.multihead_attn import SelfMultiheadAttn", "scaled_dot_product_attention"),
    ("from ampcompat.contrib import multihead_attn", "scaled_dot_product_attention"),
    ("import ampcompat.contrib.sparsity", "torch.ao.pruning"),
    ("from ampcompat.RNN import LSTM", "torch.nn.LSTM"),
    ("import ampcompat.transformer.parallel_state", "torch.distributed"),
    ("from ampcompat.contrib.optimizers.distributed_fused_adam import X", "ZeroRedundancyOptimizer"),
    ("from ampcompat.contrib.optimizers import DistributedFusedAdam", "ZeroRedundancyOptimizer"),
    ("from ampcompat.contrib import unknown", "plain torch modules"),
]


@pytest.fixture(autouse=True)
def packages_not_yet_imported():
    before = {name: module for name, module in sys.modules.items() if _is_of_a_package(name)}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if _is_of_a_package(name)]:
        del sys.modules[name]
    sys.modules.update(before)  # other tests pickle the classes that they have imported from these
    for name, module in before.items():
        parent, _, attribute = name.rpartition(".")
        setattr(sys.modules[parent], attribute, module)


def _is_of_a_package(name):
    return name.startswith("ampcompat.") and name.split(".")[1] in PACKAGES


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_import(name):
    importlib.import_module(f"ampcompat.{name}")


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize(("statement", "replacement"), STATEMENTS)
def test_use_names_the_replacement(statement, replacement, alias):
    if alias:
        install_as_apex()
        statement = statement.replace("ampcompat", "apex")
    with pytest.raises(ImportError, match=replacement) as caught:
        exec(statement, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["ampcompat", "apex"])
def test_a_probe_finds_nothing_and_is_told_nothing(package):
    install_as_apex()
    for name in ("contrib.unknown", "contrib.sparsity", "RNN.LSTM", "transformer.parallel_state"):
        parent, _, attribute = f"{package}.{name}".rpartition(".")
        assert importlib.util.find_spec(f"{package}.{name}") is None
        assert not hasattr(importlib.import_module(parent), attribute)


def test_attribute_use_gets_the_advice_too():
    contrib = importlib.import_module("ampcompat.contrib")
    with pytest.raises(AttributeError, match=r"apex\.contrib\.sparsity.*torch\.ao\.pruning"):
        contrib.sparsity.ASP  # noqa: B018


def test_reset_takes_the_finder_away():
    before = list(sys.meta_path)
    importlib.import_module("ampcompat.contrib")
    importlib.import_module("ampcompat.RNN")
    assert len(sys.meta_path) == len(before) + 1
    reset()
    assert sys.meta_path == before


def test_python_may_look_up_dunders():
    assert not hasattr(importlib.import_module("ampcompat.RNN"), "__wrapped__")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_follows_the_definition(smoothing):
    from ampcompat.contrib.xentropy import SoftmaxCrossEntropyLoss

    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4), torch.tensor([0, 2, 3])
    log_p = logits.log_softmax(-1)
    target = torch.nn.functional.one_hot(labels, 4) * (1 - smoothing) + smoothing / 4
    expected = -(target * log_p).sum(-1)
    expected[0] = 0  # padding
    torch.testing.assert_close(SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing), expected)
    assert SoftmaxCrossEntropyLoss.apply(logits.half(), labels).dtype is torch.float16
    assert SoftmaxCrossEntropyLoss.apply(logits.half(), labels, 0.0, 0, True).dtype is torch.float32


def test_mlp_is_linear_layers():
    from ampcompat.mlp import MLP

    layer, x = MLP([3, 5, 2]), torch.randn(4, 3)
    assert list(layer.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    hidden = (x @ layer.weight_0.T + layer.bias_0).relu()
    torch.testing.assert_close(layer(x), (hidden @ layer.weight_1.T + layer.bias_1).relu())
    with pytest.raises(TypeError, match="gelu"):
        MLP([3, 2], activation="gelu")


def test_mlp_lists_its_weights_and_biases():
    from ampcompat.mlp import MLP

    layer = MLP([3, 5, 2])
    assert [w is getattr(layer, f"weight_{i}") for i, w in enumerate(layer.weights)] == [True, True]
    assert [b is getattr(layer, f"bias_{i}") for i, b in enumerate(layer.biases)] == [True, True]
    assert len(list(layer.parameters())) == 4
    copied = copy.deepcopy(layer).half()
    assert [w.dtype for w in [*copied.weights, *copied.biases]] == [torch.float16] * 4
    assert [w.dtype for w in [*layer.weights, *layer.biases]] == [torch.float32] * 4
    layer.weight_1 = torch.nn.Parameter(torch.zeros(2, 5))
    assert layer.weights[1] is layer.weight_1, "replaced parameters count"
    bare = MLP([3, 5, 2], bias=False)
    assert bare.biases == []
    assert bare.bias == 0
    assert list(bare.state_dict()) == ["weight_0", "weight_1"]


@pytest.mark.parametrize(("relu", "activation"), [(True, 1), (False, 0)])
def test_mlp_takes_the_argument_of_before_activation(relu, activation):
    from ampcompat.mlp import MLP

    assert MLP([3, 2], relu=relu).activation == MLP([3, 2], True, relu).activation == activation
    with pytest.raises(TypeError, match="both"):
        MLP([3, 2], activation="sigmoid", relu=relu)


PATHS = [
    ("contrib.optimizers.fp16_optimizer", "FP16_Optimizer", "optimizers"),
    ("contrib.optimizers.fused_adam", "FusedAdam", "contrib.optimizers"),
    ("contrib.optimizers.fused_lamb", "FusedLAMB", "contrib.optimizers"),
    ("contrib.optimizers.fused_sgd", "FusedSGD", "contrib.optimizers"),
    ("contrib.xentropy.softmax_xentropy", "SoftmaxCrossEntropyLoss", "contrib.xentropy"),
    ("contrib.clip_grad.clip_grad", "clip_grad_norm_", "contrib.clip_grad"),
    ("mlp.mlp", "MLP", "mlp"),
    ("parallel.optimized_sync_batchnorm", "SyncBatchNorm", "parallel"),
    ("parallel.distributed", "Reducer", "parallel"),
]


@pytest.mark.parametrize(("path", "name", "home"), PATHS)
def test_old_import_paths(path, name, home):
    install_as_apex()
    scope = {}
    exec(f"from apex.{path} import {name}", scope)
    assert scope[name] is getattr(importlib.import_module(f"ampcompat.{home}"), name)


def test_the_layer_norm_function():
    install_as_apex()
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction

    x, weight, bias = torch.randn(2, 3), torch.randn(3), torch.randn(3)
    out = FusedLayerNormAffineFunction.apply(x, weight, bias, (3,), 1e-5)
    assert torch.equal(out, torch.nn.functional.layer_norm(x, (3,), weight, bias, 1e-5))


def test_flat_calls_by_dtype():
    install_as_apex()
    from apex.parallel.distributed import apply_flat_dist_call, split_half_float_double

    tensors = [torch.ones(2), torch.ones(3).half(), torch.ones(2, 2)]
    halves_last = split_half_float_double(tensors)
    assert [[t.dtype for t in bucket] for bucket in halves_last] == [[torch.float32] * 2, [torch.float16]]
    apply_flat_dist_call(halves_last[0], lambda flat, factor: flat.mul_(factor), (2,))
    assert torch.equal(tensors[0], torch.full((2,), 2.0))
    assert torch.equal(tensors[2], torch.full((2, 2), 2.0))
