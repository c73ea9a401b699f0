"""The lists that go to torch's foreach and fused kernels: CUDA takes one to a kernel only if it mixes nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch, optimizers
from ampcompat.parallel.LARC import LARC

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "FusedAdam": optimizers.FusedAdam,
    "FusedAdam_eps_inside": lambda params: optimizers.FusedAdam(params, eps_inside_sqrt=True, max_grad_norm=1.0),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedSGD_wd_after": lambda params: optimizers.FusedSGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True
    ),
    "FusedLAMB": optimizers.FusedLAMB,
    "FusedNovoGrad": optimizers.FusedNovoGrad,
    "FusedAdagrad": optimizers.FusedAdagrad,
    "LARC": lambda params: LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)),
}
HALVES = [torch.float16, torch.bfloat16]


def tensor_lists(args):
    return [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]


class KernelLists(TorchDispatchMode):
    """Records the tensors of each list call below autograd: one entry a list, the written list first."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach")):
            self.calls.append((func.name(), tensor_lists(args)))
        return func(*args, **(kwargs or {}))

    def mixed(self):
        """The calls in which a list mixes dtypes or devices."""
        return [
            name
            for name, lists in self.calls
            if any(len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1 for tensors in lists)
        ]


def give_gradients(params):
    for p in params:
        p.grad = torch.ones_like(p)


class TestHelpers:
    def pairs(self):
        written = [torch.zeros(2, dtype=dtype) for dtype in [torch.float32, *HALVES, torch.float32]]
        read = [torch.full((2,), i + 1.0) for i in range(3)] + [torch.full((2,), 4.0, dtype=torch.float16)]
        return written, read

    @pytest.mark.parametrize(
        "helper", [_torch.foreach_copy_, _torch.foreach_accumulate_], ids=["foreach_copy_", "foreach_accumulate_"]
    )
    def test_one_call_for_each_kind_of_pair(self, helper):
        written, read = self.pairs()
        with KernelLists() as lists:
            helper(written, read)
        assert not lists.mixed()
        assert len(lists.calls) == 4
        assert [tensor.tolist() for tensor in written] == [[1, 1], [2, 2], [3, 3], [4, 4]]

    def test_alike_pairs_go_in_one_call(self):
        with KernelLists() as lists:
            _torch.foreach_copy_([torch.zeros(2), torch.zeros(3, 1)], [torch.ones(2).half(), torch.ones(3, 1).half()])
        assert len(lists.calls) == 1

    def test_nothing_to_copy_is_no_call(self):
        with KernelLists() as lists:
            _torch.foreach_copy_([], [])
        assert not lists.calls

    def test_other_strides_go_apart(self):
        written = [torch.zeros(2, 3) for _ in range(3)]
        read = [torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3)]
        with KernelLists() as lists:
            _torch.foreach_copy_(written, read)
        assert sorted(len(tensors) for _, (tensors, _) in lists.calls) == [1, 2]
        assert all(torch.equal(tensor, torch.ones(2, 3)) for tensor in written)

    def test_devices_go_apart(self):
        with FakeTensorMode(), KernelLists() as lists:
            written = [torch.zeros(2, device=f"cuda:{i % 2}") for i in range(4)]
            _torch.foreach_copy_(written, [tensor.half() for tensor in written])
        assert not lists.mixed()
        assert len(lists.calls) == 2

    def test_lists_of_unequal_length_are_refused(self):
        with pytest.raises(ValueError, match="zip"):
            _torch.foreach_copy_([torch.zeros(2)], [])
