"""The lists that go to torch's foreach and fused kernels: CUDA takes one to a kernel only if it mixes nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch, amp, optimizers
from ampcompat.parallel.LARC import LARC

pytestmark = [pytest.mark.device, pytest.mark.torch]

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
    "LARC": lambda params: LARC(optimizers.FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)),
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
        assert lists.mixed() == []
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
            written = [torch.zeros(2, device=device) for device in ["cpu", "cuda:0"] * 2]
            _torch.foreach_copy_(written, [tensor.half() for tensor in written])
        assert lists.mixed() == []
        assert len(lists.calls) == 2

    def test_lists_of_unequal_length_are_refused(self):
        with pytest.raises(ValueError, match="longer than argument 1"):
            _torch.foreach_copy_([torch.zeros(2)], [torch.ones(2), torch.ones(2)])


def test_the_check_would_notice():
    with KernelLists() as lists:
        torch._foreach_copy_([torch.zeros(2), torch.zeros(2).half()], [torch.ones(2), torch.ones(2)])
    assert lists.mixed() == ["aten::_foreach_copy_"]


class TestTrainingNeverMixesLists:
    @pytest.mark.cover(1)
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
    @pytest.mark.parametrize("level", LEVELS)
    def test_two_blocks_a_step_with_overflows_and_a_param_in_bfloat16(self, level, make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
        optimizer = make(list(model.parameters()))
        options = {} if level in ("O0", "O4") else {"loss_scale": "dynamic"}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        late = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [late]})
        with KernelLists() as lists:
            for factor in (1.0, float("inf"), 1.0) if options else (1.0, 1.0, 1.0):
                for _ in range(2):
                    loss = (model(torch.randn(5, 6)).float() + late.float()).square().mean() * factor
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert lists.mixed() == []

    @pytest.mark.parametrize("dtypes", [HALVES, [torch.float16, torch.float32], [torch.float64, HALVES[0]]], ids=str)
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
    def test_groups_of_two_dtypes(self, make, dtypes):
        params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes * 2]
        optimizer = make(params)
        for _ in range(2):
            give_gradients(params)
            with KernelLists() as lists:
                optimizer.step()
        assert lists.mixed() == []

    @pytest.mark.parametrize(
        "make",
        [
            lambda params: optimizers.FusedAdam(params, master_weights=True),
            lambda params: optimizers.FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16),
        ],
        ids=["FusedAdam", "FusedMixedPrecisionLamb"],
    )
    def test_masters_of_an_optimizer(self, make):
        params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float16, torch.float32)]
        optimizer = make(params)
        with KernelLists() as lists:
            for _ in range(2):
                give_gradients(params)
                optimizer.step()
        assert lists.mixed() == []
        master = optimizer.state[params[0]]["master_param"]
        assert torch.equal(master.half(), params[0])


class Launches(KernelLists):
    """Counts kernel launches as CUDA makes them, for short lists: one a call, or one a pair if their strides differ."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name.startswith("aten::_foreach"):
            lists = tensor_lists(args)
            is_one_launch = len({tuple(tensor.stride() for tensor in tensors) for tensors in lists}) == 1
            self.count += 1 if is_one_launch else len(lists[0])
        elif not func.is_view and name != "aten::empty_like":
            self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


ELEMENTWISE = ["FusedAdam", "FusedAdam_eps_inside", "FusedSGD", "FusedSGD_wd_after", "FusedAdagrad"]


class TestLaunches:
    def launches(self, name, count, dtype=torch.float32, is_scaled=False):
        """Kernel launches of the second step of ``count`` params."""
        params = [torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(count)]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(2):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # what a step sends to the host has arrived before the next
            give_gradients(params)
            if is_scaled:
                optimizer.found_inf = torch.zeros(())
                optimizer.grad_scale = torch.full((), 2.0)
            with Launches() as launches:
                optimizer.step()
        return launches.count

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
    @pytest.mark.parametrize("name", ELEMENTWISE)
    def test_do_not_grow_with_the_number_of_params(self, name, is_scaled, dtype):
        assert self.launches(name, 2, dtype, is_scaled) == self.launches(name, 20, dtype, is_scaled)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize(
        ("name", "is_scaled"),
        [("FusedLAMB", False), ("FusedLAMB", True), ("FusedNovoGrad", False), ("FusedNovoGrad", True), ("LARC", False)],
    )
    def test_grow_by_the_factor_of_each_layer(self, name, is_scaled, dtype):
        assert self.launches(name, 20, dtype, is_scaled) - self.launches(name, 2, dtype, is_scaled) == 18
