"""The functions of ``apex.fp16_utils`` that cast a network and copy between masters and model."""

import pytest
import torch
from torch import nn

from ampcompat import fp16_utils
from ampcompat.fp16_utils import (
    FP16Model,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
)


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))


@pytest.mark.parametrize("convert", [network_to_half, lambda n: convert_network(n, torch.float16), FP16Model])
def test_affine_batch_norms_stay_float32(convert):
    model = net()
    convert(model)
    assert model[0].weight.dtype is torch.float16
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32
    assert model[2].running_mean.dtype is torch.float16


def test_network_to_half_casts_its_input():
    model = network_to_half(nn.Linear(3, 2))
    assert model(torch.ones(1, 3)).dtype is torch.float16
    assert FP16Model(nn.Linear(3, 2))(torch.ones(1, 3)).dtype is torch.float16


@pytest.mark.parametrize("flat", [False, True])
def test_round_trip_of_masters(flat):
    model = nn.Linear(3, 2).half()
    params, masters = prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 2)
    model(torch.ones(1, 3).half()).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=flat)
    expected = [p.detach().float() - 0.5 * p.grad.float() for p in params]
    with torch.no_grad():
        for m in masters:
            m -= 0.5 * m.grad
    master_params_to_model_params(params, masters, flat_master=flat)
    assert all(torch.equal(p, e.half()) for p, e in zip(params, expected))


def test_a_flat_master_needs_one_dtype():
    with pytest.raises(ValueError, match="one dtype"):
        prep_param_lists(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), flat_master=True)


def test_exports_are_there():
    assert all(hasattr(fp16_utils, name) for name in fp16_utils.__all__)
    assert to_python_float(torch.tensor([2.0])) == to_python_float([2.0]) == 2.0
