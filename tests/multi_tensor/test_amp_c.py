"""amp_C through multi_tensor_applier, called as legacy code calls it."""

import pytest
import torch

from ampcompat import amp_C
from ampcompat.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from ampcompat.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

pytestmark = pytest.mark.device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 4), (5,), ()]


def flag():
    return torch.zeros(1, dtype=torch.int)


def tensors(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def test_applier_is_available_and_passes_its_chunk_size():
    assert multi_tensor_applier.available is True
    assert MultiTensorApply.available is True
    applier = MultiTensorApply(64)
    applier.check_avail()
    assert applier(lambda *args: args, "flag", ["lists"], 1, 2) == (64, "flag", ["lists"], 1, 2)
    assert multi_tensor_applier.chunk_size == 2048 * 32


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
def test_scale_between_dtypes(of, to):
    source, target, overflow = tensors(of), tensors(to, seed=1), flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [source, target], 1.0 / 8)
    assert all(torch.equal(t, (s.float() / 8).to(to)) for s, t in zip(source, target))
    assert overflow.tolist() == [0]


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_flags_what_is_not_finite_and_computes_on(dtype, bad):
    source, target, overflow = tensors(dtype), tensors(dtype, seed=1), flag()
    source[1][2] = bad
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [source, target], 0.5)
    assert overflow.tolist() == [1]
    assert not target[1][2].isfinite()
    assert torch.equal(target[0], (source[0].float() * 0.5).to(dtype))
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [tensors(), tensors()], 0.5)
    assert overflow.tolist() == [1], "a later clean call does not clear the flag"


def test_scale_in_place_and_into_views():
    values, whole = tensors(), torch.zeros(5, 2)
    wanted = [v * 4 for v in values]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[values[1]], [whole[:, 1]]], 4.0)
    assert torch.equal(whole, torch.stack([torch.zeros(5), wanted[1]], 1))
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [values, values], 4.0)
    assert all(torch.equal(v, w) for v, w in zip(values, wanted))


def test_scale_takes_params_that_require_grad():
    p = torch.nn.Parameter(torch.ones(2))
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.full((2,), 3.0)], [p]], 1.0)
    assert torch.equal(p.detach(), torch.full((2,), 3.0))


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_axpby(to):
    x, y, out, overflow = tensors(torch.float16), tensors(seed=1), tensors(to, seed=2), flag()
    multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, [x, y, out], 0.5, 2.0, -1)
    assert all(torch.equal(o, (0.5 * a.float() + 2.0 * b).to(to)) for a, b, o in zip(x, y, out))
    assert overflow.tolist() == [0]


@pytest.mark.parametrize(("checked", "flags"), [(-1, [1, 1]), (0, [1, 0]), (1, [0, 1])])
def test_axpby_checks_the_argument_it_is_told_to(checked, flags):
    for bad_argument in (0, 1):
        lists = [tensors(), tensors(seed=1), tensors()]
        lists[bad_argument][0][0, 0] = float("inf")
        overflow = flag()
        multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, lists, 1.0, 1.0, checked)
        assert overflow.tolist() == [flags[bad_argument]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2norm(dtype):
    values = [t.to(dtype) for t in tensors()]
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [values], True)
    wanted = torch.stack([t.double().norm() for t in values])
    torch.testing.assert_close(each, wanted.float())
    torch.testing.assert_close(norm, wanted.norm().float().reshape(1))
    assert norm.dtype == each.dtype == torch.float32
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [values])
    assert norm.shape == (1,)
    assert each.numel() == 0


def test_l2norm_of_half_beyond_float16():
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [[torch.full((70000,), 300.0).half()]], False)
    # 70000 equal squares added up one after the other in float32 lose up to 1e-4 on the CPU.
    torch.testing.assert_close(norm, torch.tensor([300.0 * 70000**0.5]), rtol=1e-4, atol=0.0)


def test_no_tensors_at_all():
    for op, lists, args in (
        (amp_C.multi_tensor_scale, [[], []], (1.0,)),
        (amp_C.multi_tensor_axpby, [[], [], []], (1.0, 1.0, -1)),
        (amp_C.multi_tensor_adam, [[], [], [], []], (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)),
        (amp_C.multi_tensor_sgd, [[], [], []], (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)),
        (amp_C.multi_tensor_adagrad, [[], [], []], (0.1, 1e-8, 0, 0.0)),
        (amp_C.multi_tensor_lamb_stage1_cuda, [[], [], [], [], []], (torch.zeros(0), 0, 0.9, 0.99, 1e-6, 1.0, 1.0)),
        (amp_C.multi_tensor_lamb_stage2_cuda, [[], []], (torch.zeros(0), torch.zeros(0), 0.1)),
    ):
        multi_tensor_applier(op, flag(), lists, *args)
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [[]], True)
    assert norm.tolist() == [0.0]
    assert each.numel() == 0


def test_lists_that_are_not_parallel_are_refused():
    """They are refused before anything is changed."""
    values, target = tensors(), tensors(seed=1)
    before = [t.clone() for t in target]
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale got lists of \[3, 2\] tensors: it takes 2"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [values, target[:2]], 1.0)
    with pytest.raises(RuntimeError, match="it takes 4"):
        multi_tensor_applier(amp_C.multi_tensor_adam, flag(), [values, target], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    lists = [values, target, zeros(), target[:2]]
    with pytest.raises(RuntimeError, match="it takes 4"):
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag(), lists, 0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)
    with pytest.raises(RuntimeError, match=r"shapes \[\(2,\), \(3,\)\] at position 0"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.ones(2)], [torch.ones(3)]], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, target))


class Twin:
    """An optimizer and the same params, gradients and state as bare lists for amp_C."""

    def __init__(self, cls, dtype, **options):
        self.params = [torch.nn.Parameter(t) for t in tensors(dtype)]
        self.optimizer = cls(self.params, **options)
        self.bare = tensors(dtype)

    def grads(self, step):
        torch.manual_seed(30 + step)
        for p in self.params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        return [p.grad.clone() for p in self.params]

    def check(self):
        assert all(torch.equal(p, b) for p, b in zip(self.params, self.bare))


def zeros(dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [0, 1])
def test_adam_is_the_optimizers_rule(mode, dtype):
    twin = Twin(FusedAdam, dtype, lr=0.1, adam_w_mode=bool(mode), weight_decay=0.1)
    m, v = zeros(), zeros()
    for step in (1, 2, 3):
        lists = [twin.grads(step), twin.bare, m, v]
        twin.optimizer.step()
        multi_tensor_applier(amp_C.multi_tensor_adam, flag(), lists, 0.1, 0.9, 0.999, 1e-8, step, mode, True, 0.1)
    twin.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lamb_is_the_optimizers_rule(dtype):
    twin = Twin(FusedLAMB, dtype, lr=0.1)
    m, v = zeros(dtype), zeros(dtype)
    for step in (1, 2, 3):
        grads = twin.grads(step)
        norm = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [grads], False)[0]
        arguments = (0.1, 0.9, 0.999, 1e-6, step, True, 0.01, 1, 1, norm, 1.0, False)
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag(), [grads, twin.bare, m, v], *arguments)
        twin.optimizer.step()
    twin.check()


def norms_of(tensors):
    return multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [tensors], True)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("decay", "nvlamb"), [(0.01, False), (0.0, False), (0.0, True)])
def test_the_two_stages_of_lamb_are_the_optimizers_rule(decay, nvlamb, dtype):
    """As the first ``FusedLAMB`` called them: updates in lists of their own, a decay per tensor, a step from 0."""
    twin = Twin(FusedLAMB, dtype, lr=0.1, weight_decay=decay, use_nvlamb=nvlamb)
    m, v, updates = zeros(dtype), zeros(dtype), zeros(dtype)
    for step in (0, 1, 2):
        grads = twin.grads(step)
        norm = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [grads], False)[0]
        lists = [grads, twin.bare, m, v, updates]
        arguments = (torch.full((3,), decay), step, 0.9, 0.999, 1e-6, norm if step else norm.item(), 1.0)
        multi_tensor_applier(amp_C.multi_tensor_lamb_stage1_cuda, flag(), lists, *arguments)
        norms = norms_of(twin.bare), norms_of(updates)
        lists = [twin.bare, updates]
        multi_tensor_applier(amp_C.multi_tensor_lamb_stage2_cuda, flag(), lists, *norms, 0.1, decay, nvlamb)
        twin.optimizer.step()
    twin.check()


def test_stage_1_of_lamb_against_hand_computed_values():
    """Each tensor has its own decay, and an inf reaches the update."""
    p, g, m, v, u = ([torch.tensor([x]), torch.tensor([x])] for x in (2.0, 3.0, 0.0, 0.0, 9.0))
    arguments = (torch.tensor([0.0, 0.5]), 0, 0.9, 0.99, 0.0, 6.0, 2.0)  # clipped to a third; m/bias1 = 1, v/bias2 = 1
    multi_tensor_applier(amp_C.multi_tensor_lamb_stage1_cuda, flag() + 1, [g, p, m, v, u], *arguments)
    torch.testing.assert_close(torch.cat(u), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(torch.cat([*m, *v]), torch.tensor([0.1, 0.1, 0.01, 0.01]))
    assert [t.item() for t in (*p, *g)] == [2.0, 2.0, 3.0, 3.0]
    g[0].fill_(float("inf"))
    multi_tensor_applier(amp_C.multi_tensor_lamb_stage1_cuda, flag(), [g, p, m, v, u], *arguments)
    assert not u[0].isfinite()
    assert u[1].isfinite()


def test_stage_2_of_lamb_by_hand():
    for arguments, wanted in (
        ((), [2.0 - 0.1 * 2 / 4 * 4, 0.0 - 0.4]),  # callers from before the weight decay was an argument
        ((0.0, False), [2.0 - 0.4, -0.4]),
        ((0.0, True), [2.0 - 0.1 * 2 / 4 * 4, -0.4]),
        ((0.1, None), [2.0 - 0.1 * 2 / 4 * 4, -0.4]),
    ):
        p, u = [torch.tensor([2.0]), torch.zeros(1)], [torch.tensor([4.0]), torch.tensor([4.0])]
        norms = torch.tensor([2.0, 0.0]), torch.tensor([4.0, 4.0])
        multi_tensor_applier(amp_C.multi_tensor_lamb_stage2_cuda, flag(), [p, u], *norms, 0.1, *arguments)
        torch.testing.assert_close(torch.cat(p), torch.tensor(wanted))
        assert torch.equal(torch.cat(u), torch.tensor([4.0, 4.0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad_is_the_optimizers_rule(mode, dtype):
    twin = Twin(FusedAdagrad, dtype, lr=0.1, weight_decay=0.1, adagrad_w_mode=bool(mode))
    h = zeros(dtype)
    for step in (1, 2, 3):
        multi_tensor_applier(
            amp_C.multi_tensor_adagrad, flag(), [twin.grads(step), twin.bare, h], 0.1, 1e-10, mode, 0.1
        )
        twin.optimizer.step()
    twin.check()


@pytest.mark.parametrize("norm_type", [0, 2])
def test_novograd_is_the_optimizers_rule(norm_type):
    twin = Twin(FusedNovoGrad, torch.float32, lr=0.1, weight_decay=0.1, norm_type=norm_type, init_zero=True)
    m, norms = zeros(), torch.zeros(3)
    for step in (1, 2, 3):
        lists = [twin.grads(step), twin.bare, m]
        arguments = (norms, 0.1, 0.9, 0.999, 1e-8, step, True, 0.1, True, 1, norm_type)
        multi_tensor_applier(amp_C.multi_tensor_novograd, flag(), lists, *arguments)
        twin.optimizer.step()
    twin.check()
    assert [twin.optimizer.state[p]["exp_avg_sq"].item() for p in twin.params] == norms.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("after", [False, True])
def test_sgd_is_the_optimizers_rule(after, dtype):
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "wd_after_momentum": after}
    twin = Twin(FusedSGD, dtype, **options)
    buffers = [torch.full(shape, float("nan"), dtype=dtype) for shape in SHAPES]  # a first run does not read them
    for step in (1, 2, 3):
        lists = [[g * 4 for g in twin.grads(step)], twin.bare, buffers]
        multi_tensor_applier(
            amp_C.multi_tensor_sgd, flag(), lists, 0.1, 0.9, 0.2, 0.1, False, step == 1, after, 1.0 / 4
        )
        twin.optimizer.step()
    twin.check()


def test_sgd_writes_the_half_copy():
    """Where the overflow flag is set it writes nothing."""
    params, half, buffers = tensors(), tensors(torch.float16, seed=3), zeros()
    arguments = (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)
    multi_tensor_applier(amp_C.multi_tensor_sgd, flag(), [tensors(seed=1), params, buffers, half], *arguments)
    assert all(torch.equal(p.half(), h) for p, h in zip(params, half))
    before, kept = [p.clone() for p in params], [b.clone() for b in buffers]
    bad = [torch.full(shape, float("inf")) for shape in SHAPES]
    multi_tensor_applier(amp_C.multi_tensor_sgd, flag() + 1, [bad, params, buffers, half], *arguments)
    assert all(torch.equal(a, b) for a, b in zip([*before, *kept], [*params, *buffers]))
