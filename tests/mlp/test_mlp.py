"""``apex.mlp.MLP``: linear layers and activations, by apex's names of their weights."""

import copy

import pytest
import torch

from ampcompat.mlp import MLP


def test_is_linear_layers():
    layer, x = MLP([3, 5, 2]), torch.randn(4, 3)
    assert list(layer.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    hidden = (x @ layer.weight_0.T + layer.bias_0).relu()
    torch.testing.assert_close(layer(x), (hidden @ layer.weight_1.T + layer.bias_1).relu())
    with pytest.raises(TypeError, match="gelu"):
        MLP([3, 2], activation="gelu")


def test_lists_its_weights_and_biases():
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
def test_takes_the_argument_of_before_activation(relu, activation):
    assert MLP([3, 2], relu=relu).activation == MLP([3, 2], True, relu).activation == activation
    with pytest.raises(TypeError, match="both"):
        MLP([3, 2], activation="sigmoid", relu=relu)
