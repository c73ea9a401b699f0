"""Gradients of masters: scripts may hold them past the step, and later passes add to them without copies."""

import pytest
import torch
from amp_training import backward, same, sgd, start
from internals import end_watch
from torch.utils.weak import TensorWeakRef

from ampcompat import _torch, amp

pytestmark = [pytest.mark.device, pytest.mark.torch]


def gradients(optimizer):
    return [param.grad for param in amp.master_params(optimizer) if param.grad is not None]


def step(model, optimizer, seed):
    backward(model, optimizer, seed)
    found = gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return found


def test_held_gradients_keep_their_values():
    # Where a step did not let go of them, the next block would add to them in place.
    model, optimizer = start("O2")
    backward(model, optimizer, 0)
    held = gradients(optimizer)
    before = [grad.clone() for grad in held]
    optimizer.step()
    backward(model, optimizer, 1)
    assert held
    assert all(torch.equal(grad, old) for grad, old in zip(held, before, strict=True))


class Heads(torch.nn.Module):
    """Two heads; a pass uses the second if it is asked to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


@pytest.mark.parametrize("how", ["block", "failed block", "shared"])
def test_a_sum_that_the_last_block_did_not_reach_is_cleared_in_the_model(how):
    """``p.grad = None`` of every parameter, with no step before: the next block begins anew."""
    model = Heads()
    optimizer = sgd(model)
    second = torch.optim.SGD(model.second.parameters(), lr=0.1)
    model, (optimizer, second) = amp.initialize(model, [optimizer, second], opt_level="O2", verbosity=0)

    def block(both):
        return amp.scale_loss(model(torch.ones(1, 2), both).sum(), second if how == "shared" else optimizer)

    for both in (True, False):
        context = block(both)
        context.__enter__().backward()
        fails = how == "failed block" and not both
        context.__exit__(*((ZeroDivisionError, ZeroDivisionError()) if fails else (None, None)))
    assert model.second.weight.grad is not None
    assert model.second.weight.grad.dtype == torch.float16
    for param in model.parameters():
        param.grad = None
    with block(True) as scaled:
        scaled.backward()
    (master,) = amp.master_params(second)
    assert master.grad.tolist() == [[1.0, 1.0]]


def test_master_gradients_are_laid_out_as_their_masters():
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    weight = model.weight
    for transposed in (None, False, True, False):
        with amp.scale_loss(model(torch.tensor([1])).sum() / 4, optimizer) as scaled:
            scaled.backward()
            if transposed is not None:
                weight.grad = weight.grad.to_dense()
                weight.grad = weight.grad.t().contiguous().t() if transposed else weight.grad
        (gradient,) = gradients(optimizer)
        assert gradient.is_sparse is (transposed is None)
        assert transposed is None or gradient.is_contiguous()
        assert torch.equal(gradient.to_dense(), torch.tensor([[0.0, 0], [0.25, 0.25], [0, 0], [0, 0]]))
        optimizer.step()
        optimizer.zero_grad()


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def passes_of_two_parts(parts):
    """Train two layers at O5 by passes that each go through the layers in one of ``parts``; ops of the ends of blocks.

    Returns the ops, the masters' gradients, and what they must be: the half gradients, summed in float32.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    model.forward = lambda x, part: sum(model[i](x) for i in part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    end_watch()
    ops, sums = [], [None] * 4
    for part in parts:
        manager = amp.scale_loss(model(torch.randn(8, 4), part).square().mean(), optimizer)
        manager.__enter__().backward()
        for at, param in enumerate(model.parameters()):
            if param.grad is not None:
                wide = param.grad.float()
                sums[at] = wide if sums[at] is None else sums[at] + wide
        with Ops() as seen:
            manager.__exit__(None, None, None)
        ops.append(seen.seen)
    return ops, [param.grad for param in amp.master_params(optimizer)], sums


@pytest.mark.on_cpu
def test_unscaled_gradients_are_added_without_copies():
    ops, found, expected = passes_of_two_parts([(0, 1), (0, 1), (0, 1)])
    assert ops == [["aten::_to_copy"] * 4, *[["aten::_foreach_add_.List"]] * 2]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fused_copies_are_those_of_the_cpu():
    tensors = [torch.randn(4, 6).half().t(), torch.full((), 70000.0).half(), torch.randn(2, 3, 4, 4).bfloat16()]
    tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    for tensor in tensors:
        for like in (torch.empty_like(tensor, dtype=torch.float32), torch.empty(tensor.shape)):
            (fused,), (one,) = (
                copies([tensor], [like]) for copies in (_torch.fused_float32_copies, _torch.float32_copies)
            )
            assert torch.equal(fused, one)
            assert fused.stride() == one.stride() == like.stride()


@pytest.mark.parametrize("parts", [[(0,), (0, 1), (0, 1)], [(1,), (0, 1)], [(0, 1), (0,), (1,)]])
def test_gradients_that_come_with_a_later_pass_are_float32(parts):
    _, found, expected = passes_of_two_parts(parts)
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_half_gradients_are_not_kept_alive_by_their_masters():
    model, optimizer = start("O2")
    for clear in (optimizer.zero_grad, lambda: (optimizer.step(), model.zero_grad())):
        backward(model, optimizer)
        held = [TensorWeakRef(p.grad) for p in model.parameters()]
        clear()
        assert not any(ref() is not None for ref in held)


def test_an_optimizer_joins_before_the_step():
    """A second optimizer for the model, given between a block and its step, does not change the gradients."""
    model, first = start("O2")
    backward(model, first)
    _, second = amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    kept = [p.grad.clone() for p in amp.master_params(first)]
    assert same(kept, [p.grad for p in amp.master_params(second)])
