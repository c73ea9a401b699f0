"""Masters take over the float32 memory that the model leaves, where nobody else could notice."""

import numpy
import pytest
import torch

from ampcompat import amp

pytestmark = pytest.mark.device


def master_of(weight):
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight is weight
    assert weight.dtype == torch.float16
    (master,) = amp.master_params(optimizer)
    return master


def test_a_weight_that_nobody_else_holds_is_not_copied():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    place, values = weight.data_ptr(), weight.tolist()
    master = master_of(weight)
    assert master.data_ptr() == place
    assert master.tolist() == values
    assert type(master) is torch.nn.Parameter
    assert master.requires_grad
    assert master.is_leaf
    assert master._version == 0


class Storage:
    def __init__(self, storage):
        self.tolist = storage.tolist


def below(values):
    array = numpy.array(values.numpy())
    return array, torch.from_numpy(array)


#: From values to who else holds memory (or None), and the weight.
HELD = {
    "a tensor of the same memory": lambda values: (values.data, values),
    "a view": lambda values: (values[1:], values),
    "a parameter cut from a larger tensor": lambda values: (None, torch.cat([values, values])[:4]),
    "an array over the parameter": lambda values: (values.numpy(), values),
    "an array below the parameter": below,
    "its storage": lambda values: (Storage(values.untyped_storage()), values),
    "a tensor set to its storage": lambda values: (torch.tensor([]).set_(values.untyped_storage()), values),
    "memory of several processes": lambda values: (None, values.share_memory_()),
}


@pytest.mark.on_cpu
@pytest.mark.parametrize("kind", HELD)
def test_memory_that_somebody_else_holds_is_left_alone(kind):
    held, values = HELD[kind](torch.randn(4, 4))
    weight = torch.nn.Parameter(values)
    del values
    place, before = weight.data_ptr(), None if held is None else held.tolist()
    master = master_of(weight)
    assert master.data_ptr() != place
    with torch.no_grad():
        master.add_(1)
    if held is not None:
        assert held.tolist() == before


LAID_OUT = {
    "transposed": lambda values: values.t(),
    "expanded": lambda values: values[:1].expand(4, 4),
    "overlapping": lambda values: values.as_strided((4, 4), (1, 1)),
}


@pytest.mark.parametrize("kind", LAID_OUT)
def test_masters_have_the_strides_of_a_clone(kind):
    """The weights are not contiguous, or not dense."""
    weight = torch.nn.Parameter(LAID_OUT[kind](torch.randn(4, 4)))
    exact = weight.detach().clone()
    master = master_of(weight)
    assert master.stride() == exact.stride()
    assert torch.equal(master.detach(), exact)
