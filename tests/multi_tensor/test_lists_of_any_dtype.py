"""``amp_C`` over what a state dict holds: integers, mixed dtypes, empty tensors, empty lists; and the flag."""

import pytest
import torch

from ampcompat import amp_C
from ampcompat.multi_tensor_apply import multi_tensor_applier
from ampcompat.optimizers import FusedMixedPrecisionLamb

pytestmark = [pytest.mark.device, pytest.mark.torch]


def flag(value=0):
    return torch.full((1,), value, dtype=torch.int)


def mixed():
    """As a state dict: float32, half, an integer, a mask, float64, an empty buffer."""
    return [
        torch.tensor([1.5, -2.0]),
        torch.tensor([0.5, 3.0], dtype=torch.float16),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.tensor([[2.5]], dtype=torch.float64),
        torch.zeros(0),
        torch.tensor([-4.0], dtype=torch.bfloat16),
        torch.tensor([200], dtype=torch.uint8),
    ]


def test_scale():
    source, target, overflow = mixed(), [torch.zeros_like(t) for t in mixed()], flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [source, target], 0.5)
    for before, after in zip(source, target, strict=True):
        assert torch.equal(after, (before.double() * 0.5).to(before.dtype))
    assert target[2].item() == 3, "a cast to an integer drops the fraction"
    assert overflow.item() == 0


def test_axpby_in_place():
    averages, weights, overflow = mixed(), mixed(), flag()
    weights[2] += 10
    wanted = [(0.75 * a.double() + 0.25 * w.double()).to(a.dtype) for a, w in zip(averages, weights)]
    multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, [averages, weights, averages], 0.75, 0.25, -1)
    assert all(torch.equal(a, b) for a, b in zip(averages, wanted, strict=True))
    assert averages[2].item() == 9
    assert overflow.item() == 0


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.995, 0.999, 0.9999])
def test_an_average_of_equal_integers_is_that_integer(decay):
    """``position_ids`` are the same in the model and its average. float32 arithmetic and a cast would lower some."""
    ids = torch.arange(3000)
    average = ids.clone()
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag(), [[average], [ids], [average]], decay, 1 - decay, -1)
    assert torch.equal(average, ids)


def test_integers_are_never_infinite():
    largest = torch.tensor([torch.iinfo(torch.int64).max])
    for op, lists, arguments in (
        (amp_C.multi_tensor_scale, [[largest], [largest.clone()]], (1.0,)),
        (amp_C.multi_tensor_axpby, [[largest], [largest], [largest.float()]], (1.0, 1.0, -1)),
        (amp_C.multi_tensor_l2norm, [[largest]], (True,)),
    ):
        overflow = flag()
        multi_tensor_applier(op, overflow, lists, *arguments)
        assert overflow.item() == 0


def test_an_infinite_tensor_between_others_is_found():
    for index in (0, 1, 4, 6):
        tensors, overflow = mixed(), flag()
        tensors[index].fill_(float("nan"))
        multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [tensors, mixed()], 1.0)
        assert overflow.item() == 1


@pytest.mark.parametrize("per_tensor", [True, False, None])
def test_l2norm(per_tensor):
    wanted = torch.stack([t.double().norm() for t in mixed()])
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [mixed()], per_tensor)
    torch.testing.assert_close(norm, wanted.norm().float().reshape(1))
    assert norm.dtype == each.dtype == torch.float32
    if per_tensor:
        torch.testing.assert_close(each, wanted.float())
    else:
        assert each.numel() == 0


def test_the_views_of_a_dict_are_lists():
    state = {"weight": torch.ones(2), "steps": torch.tensor(3)}
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [state.values(), state.values()], 2.0)
    assert state["steps"].item() == 6
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [state.values()])
    torch.testing.assert_close(norm, torch.tensor([44.0]).sqrt())


def test_a_tensor_for_a_number():
    """pybind11 read it: a coefficient that is made of the norm needs no ``item()``."""
    values = [torch.full((2,), 3.0)]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [values])
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [values, values], 1.0 / norm)
    torch.testing.assert_close(values[0].norm(), torch.ones(()))


def test_devices_that_are_mixed_are_refused():
    """apex's kernels refused them too. Nothing is changed before that."""
    target = torch.zeros(2)
    lists = [[torch.ones(2)], [torch.ones(2, device="meta")], [target]]
    with pytest.raises(RuntimeError, match="got tensors on .* and meta - those of one call are on one device"):
        multi_tensor_applier(amp_C.multi_tensor_axpby, flag(), lists, 1.0, 1.0, -1)
    assert target.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("op", [amp_C.multi_tensor_l2norm, amp_C.multi_tensor_l2norm_mp])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norms_flag_what_is_not_finite(op, bad):
    """The contributed ``FP16_Optimizer`` looks for overflows this way."""
    overflow = flag()
    multi_tensor_applier(op, overflow, [[torch.ones(2), torch.tensor([1.0, bad])]], True)
    assert overflow.item() == 1
    multi_tensor_applier(op, overflow, [[torch.ones(2)]], True)
    assert overflow.item() == 1, "a later clean call does not clear the flag"


def test_an_empty_list_leaves_the_flag():
    overflow = flag(1)
    none = torch.zeros(0)
    for op, lists, arguments in (
        (amp_C.multi_tensor_l2norm_mp, [[]], (True,)),
        (amp_C.multi_tensor_l2norm_scale, [[], []], (2.0, True)),
        (amp_C.multi_tensor_unscale_l2norm, [[]], (torch.ones(1), True)),
    ):
        norm, each = multi_tensor_applier(op, overflow, lists, *arguments)
        assert norm.tolist() == [0.0]
        assert torch.equal(each, none)
    one = torch.ones(1)
    multi_tensor_applier(amp_C.multi_tensor_adam_capturable, overflow, [[]] * 4, *capturable(), one)
    multi_tensor_applier(amp_C.multi_tensor_adam_capturable_master, overflow, [[]] * 5, *capturable(), one)
    multi_tensor_applier(amp_C.multi_tensor_lamb_mp, overflow, [[]] * 4, *lamb_mp(found_inf=0.0, inv_scale=1.0))
    multi_tensor_applier(amp_C.multi_tensor_novograd, overflow, [[]] * 3, none, 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 0, 2)
    assert overflow.item() == 1


def capturable(step=1):
    return torch.tensor(0.1), 0.9, 0.999, 1e-8, torch.tensor([step], dtype=torch.int), 1, 1, 0.1


def lamb_mp(found_inf, inv_scale, step=1, norm=1.0):
    head = (torch.tensor(0.1), 0.9, 0.999, 1e-6, torch.tensor([step], dtype=torch.int), 1, 0.01, 1, 1)
    tail = (torch.tensor([norm]), torch.tensor([1.0]), False, torch.tensor([found_inf]), torch.tensor([inv_scale]))
    return *head, *tail


def lists_of(count, half=torch.float16):
    """Gradients, params, two moments, and params of another dtype."""
    torch.manual_seed(1)
    made = [[torch.rand(3), torch.rand(2, 2)] for _ in range(count)]
    if count == 5:
        made[4] = [p.to(half) + 1 for p in made[4]]
    return made


def cloned(lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def equal(first, second):
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


#: Those that write nothing where the flag is set on entry.
RETURN_AT_ONCE = {
    "sgd": (amp_C.multi_tensor_sgd, 3, (0.1, 0.9, 0.0, 0.1, False, True, False, 1.0)),
    "sgd with copies": (amp_C.multi_tensor_sgd, 4, (0.1, 0.9, 0.0, 0.1, False, False, False, 1.0)),
    "adam_capturable": (amp_C.multi_tensor_adam_capturable, 4, (*capturable(), torch.tensor([0.5]))),
    "adam_capturable_master": (amp_C.multi_tensor_adam_capturable_master, 5, (*capturable(), torch.tensor([0.5]))),
    "lamb_mp": (amp_C.multi_tensor_lamb_mp, 4, None),
    "lamb_mp with copies": (amp_C.multi_tensor_lamb_mp, 5, None),
}


@pytest.mark.parametrize(("op", "count", "arguments"), RETURN_AT_ONCE.values(), ids=RETURN_AT_ONCE)
@pytest.mark.parametrize("bad", [1.0, float("inf"), float("nan")])
def test_functions_that_return_at_once(op, count, arguments, bad):
    lists = lists_of(count)
    lists[0][0][0] = bad
    before = cloned(lists)
    given = [
        argument.to(lists[0][0].device) if isinstance(argument, torch.Tensor) else argument
        for argument in arguments or lamb_mp(found_inf=0.0, inv_scale=0.5)
    ]
    multi_tensor_applier(op, flag(1), lists, *given)
    after = [[torch.nan_to_num(t) for t in tensors] for tensors in lists]
    assert equal(after, [[torch.nan_to_num(t) for t in tensors] for tensors in before])
    multi_tensor_applier(op, flag(0), lists, *given)
    assert not torch.equal(lists[1][1], before[1][1]), "without the flag it steps"


def test_functions_that_do_not_look_at_the_flag():
    for op, count, arguments in (
        (amp_C.multi_tensor_scale, 2, (0.5,)),
        (amp_C.multi_tensor_adam, 4, (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1)),
        (amp_C.multi_tensor_adagrad, 3, (0.1, 1e-8, 0, 0.1)),
        (amp_C.multi_tensor_lamb, 4, (0.1, 0.9, 0.99, 1e-6, 1, 1, 0.01, 1, 1, torch.ones(1), 1.0, False)),
        (amp_C.multi_tensor_novograd, 3, (torch.ones(2), 0.1, 0.9, 0.9, 1e-8, 1, 1, 0.0, 1, 0, 2)),
    ):
        lists, unflagged = lists_of(count), lists_of(count)
        before = cloned(lists)
        multi_tensor_applier(op, flag(1), lists, *arguments)
        if op is amp_C.multi_tensor_novograd:
            arguments = (torch.ones(2), *arguments[1:])  # the running norms are written
        multi_tensor_applier(op, flag(0), unflagged, *arguments)
        assert equal(lists, unflagged)
        assert not equal(lists, before)


class TestNormsThatScale:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_unscale_l2norm(self, dtype):
        """The norm that the gradients have without their scale; they stay."""
        torch.manual_seed(0)
        grads = [torch.randn(3, 2).to(dtype) * 8, torch.randn(4).to(dtype) * 8]
        before, overflow = [g.clone() for g in grads], flag()
        norm, each = multi_tensor_applier(
            amp_C.multi_tensor_unscale_l2norm, overflow, [grads], torch.tensor([1.0 / 8]), True
        )
        wanted = torch.stack([g.double().norm() / 8 for g in before])
        torch.testing.assert_close(norm, wanted.norm().float().reshape(1))
        torch.testing.assert_close(each, wanted.float())
        assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))
        assert overflow.item() == 0
        grads[1][0] = float("inf")
        multi_tensor_applier(amp_C.multi_tensor_unscale_l2norm, overflow, [grads], torch.tensor([1.0 / 8]), False)
        assert overflow.item() == 1

    def test_l2norm_scale(self):
        source, target, overflow = mixed(), [torch.zeros_like(t) for t in mixed()], flag()
        norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, overflow, [source, target], 0.5, True)
        wanted = torch.stack([t.double().norm() for t in source])
        torch.testing.assert_close(norm, wanted.norm().float().reshape(1))
        torch.testing.assert_close(each, wanted.float())
        for before, after in zip(source, target, strict=True):
            assert torch.equal(after, (before.double() * 0.5).to(before.dtype))
        assert overflow.item() == 0


class TestCapturable:
    @pytest.mark.parametrize("mode", [0, 1])
    def test_it_is_adam_on_unscaled_gradients(self, mode):
        ours, theirs = lists_of(4), lists_of(4)
        for step in (1, 2, 3):
            for grads in (ours[0], theirs[0]):
                torch.manual_seed(step)
                for grad in grads:
                    grad.copy_(torch.randn(grad.shape))
            unscaled = [grad.clone() for grad in ours[0]]
            ours[0] = [grad * 8 for grad in ours[0]]
            lr, beta1, beta2, eps, count, *_ = capturable(step)
            arguments = (lr, beta1, beta2, eps, count, mode, 1, 0.1, torch.tensor([1 / 8]))
            multi_tensor_applier(amp_C.multi_tensor_adam_capturable, flag(), ours, *arguments)
            assert equal([ours[0]], [unscaled]), "the gradients are unscaled in place"
            multi_tensor_applier(amp_C.multi_tensor_adam, flag(), theirs, 0.1, beta1, beta2, eps, step, mode, 1, 0.1)
        for a, b in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the count is on the device, in float32

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_the_step_uses_the_unscaled_gradients_before_they_are_rounded(self, dtype):
        """A loss scale is there for gradients that half cannot hold without it."""
        scale = 3.0 * 2.0**16
        inverse = torch.tensor([1 / scale])
        grads = [torch.tensor([1e-9, 3e-8, 0.1]).mul(scale).to(dtype)]
        unscaled = [grad.float() / scale for grad in grads]
        params, m, v = ([torch.full((3,), value)] for value in (1.0, 0.0, 0.0))
        plain = [unscaled, *cloned([params, m, v])]
        lists = [grads, params, m, v]
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable, flag(), lists, *capturable(), inverse)
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable, flag(), plain, *capturable(), torch.ones(1))
        for ours, theirs in zip([params, m, v], plain[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)  # 1 / scale is rounded to float32
        assert equal([grads], [[unscaled[0].to(dtype)]])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_masters_are_stepped_and_rounded(self, dtype):
        grads, masters, m, v = lists_of(4)
        halves = [p.to(dtype) for p in masters]
        grads = [g.to(dtype) for g in grads]
        plain = [[g.float() for g in grads], *cloned([masters, m, v])]
        lists = [grads, halves, m, v, masters]
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable_master, flag(), lists, *capturable(), torch.ones(1))
        multi_tensor_applier(amp_C.multi_tensor_adam_capturable, flag(), plain, *capturable(), torch.ones(1))
        assert equal([masters, m, v], plain[1:])
        assert equal([halves], [[p.to(dtype) for p in masters]])


class TestLambMp:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_it_is_the_step_of_the_optimizer(self, dtype):
        """``FusedMixedPrecisionLamb`` called it: masters, moments, half params as copies, a norm with the scale."""
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(3, 2), (4,)]]
        halves = [p.detach().clone() for p in params]
        masters = [p.float() for p in halves]
        m, v = ([torch.zeros_like(p) for p in masters] for _ in range(2))
        optimizer = FusedMixedPrecisionLamb(params, lr=0.1, reduced_precision_dtype=dtype)
        for step in (1, 2, 3):
            torch.manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape).to(dtype)
            scaled = [p.grad * 4 for p in params]
            norm = multi_tensor_applier(amp_C.multi_tensor_l2norm_mp, flag(), [scaled], False)[0]
            arguments = list(lamb_mp(found_inf=0.0, inv_scale=0.25, step=step))
            arguments[9], arguments[10] = norm, torch.tensor([4.0])  # the norm and its limit, both with the scale
            multi_tensor_applier(amp_C.multi_tensor_lamb_mp, flag(), [scaled, masters, m, v, halves], *arguments)
            optimizer.step()
        for p, half in zip(params, halves, strict=True):
            torch.testing.assert_close(p.detach(), half, rtol=1e-2, atol=1e-2)  # two ulps of bfloat16

    def test_found_inf_skips(self):
        lists = lists_of(5)
        lists[0][0][0] = float("inf")
        before = cloned(lists)
        multi_tensor_applier(amp_C.multi_tensor_lamb_mp, flag(), lists, *lamb_mp(found_inf=1.0, inv_scale=0.5))
        assert equal(lists, before)


class TestHysteresis:
    def update(self, state, found_inf, hysteresis=2, interval=3):
        scale, growth, tracker = state
        result = amp_C.update_scale_hysteresis(
            scale, growth, tracker, torch.full((1,), found_inf), 2.0, 0.5, interval, hysteresis
        )
        assert result is scale
        return scale.item(), growth.item(), tracker.item()

    def state(self, scale=16.0, growth=0, tracker=2):
        integer = {"dtype": torch.int}
        return torch.full((1,), scale), torch.full((1,), growth, **integer), torch.full((1,), tracker, **integer)

    def test_the_scale_falls_after_as_many_overflows_in_a_row_as_are_allowed(self):
        state = self.state(growth=1)
        assert self.update(state, 1.0) == (16.0, 0, 1), "the first is tolerated; the count to the next growth restarts"
        assert self.update(state, 1.0) == (8.0, 0, 0)
        assert self.update(state, 1.0) == (4.0, 0, -1), "and at each that follows"
        assert self.update(state, 0.0) == (4.0, 1, 2), "a clean step restores the tolerance"
        assert self.update(state, 1.0) == (4.0, 0, 1)

    def test_it_grows_as_torchs(self):
        state = self.state()
        assert [self.update(state, 0.0)[:2] for _ in range(4)] == [(16.0, 1), (16.0, 2), (32.0, 0), (32.0, 1)]
        state = self.state(scale=3e38, growth=2)
        assert self.update(state, 0.0)[0] == torch.tensor(3e38).item(), "not to inf"

    def test_with_a_tolerance_of_one_it_is_torchs_update(self):
        ours, plain = self.state(tracker=1), self.state()
        for found_inf in (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0):
            self.update(ours, found_inf, hysteresis=1)
            torch._amp_update_scale_(plain[0], plain[1], torch.full((1,), found_inf), 2.0, 0.5, 3)
            assert torch.equal(ours[0], plain[0])
            assert torch.equal(ours[1], plain[1])

    def test_tensors_without_a_dimension(self):
        """As ``GradScaler`` keeps its scale and tracker."""
        scale, growth, tracker = (t.reshape(()) for t in self.state())
        amp_C.update_scale_hysteresis(scale, growth, tracker, torch.ones(()), 2.0, 0.5, 3, 1)
        assert (scale.item(), growth.item(), tracker.item()) == (16.0, 0, 1)
