"""Which gradients DistributedDataParallel reduces, on two gloo processes; the rule is the mean of both ranks' own."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from amp_training import make_step
from process_group import run_on_two_processes
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampcompat import amp
from ampcompat.parallel import DistributedDataParallel

pytestmark = pytest.mark.torch

MODES = ({"delay_allreduce": True}, {"delay_allreduce": False}, {"message_size": 1})


class Parts(nn.Module):
    """A body and two heads; a call says which of them it uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x, *heads):
        hidden = self.body(x).tanh()
        return sum(getattr(self, head)(hidden).pow(2).mean() for head in heads)


def data(rank, step=0):
    torch.manual_seed(10 * step + rank)
    return torch.randn(3, 4)


def mean_of_ranks(gradients):
    """What each parameter's gradient should be: the mean over ranks, None where no rank has one."""
    means = []
    for gradient, shape in gradients:
        has_one = torch.tensor(float(gradient is not None))
        total = torch.zeros(shape) if gradient is None else gradient.clone()
        dist.all_reduce(has_one)
        dist.all_reduce(total)
        means.append(total / 2 if has_one else None)
    return means


def own_gradients(model):
    return [(p.grad, p.shape) for p in model.parameters()]


def assert_reduced(wrapped, plain):
    for (name, param), mean in zip(plain.named_parameters(), mean_of_ranks(own_gradients(plain)), strict=True):
        got = wrapped.module.get_parameter(name).grad
        if mean is None:
            assert got is None, name
        else:
            torch.testing.assert_close(got, mean, msg=lambda text, name=name: f"{name}: {text}")


def both(**options):
    """The model under DistributedDataParallel, and a copy that keeps each rank's own gradients."""
    plain = Parts()
    return DistributedDataParallel(Parts(), **options), plain


def backward_on_both(wrapped, plain, x, *heads):
    wrapped.zero_grad()
    plain.zero_grad()
    wrapped(x, *heads).backward()
    plain(x, *heads).backward()


def check_unused_parameters(rank):
    for options in MODES:
        wrapped, plain = both(**options)
        for step in range(3):
            backward_on_both(wrapped, plain, data(rank, step), "left")
            assert_reduced(wrapped, plain)
        assert wrapped.module.right.weight.grad is None


def check_freezing_after_the_wrap(rank):
    for options in MODES:
        wrapped, plain = both(**options)
        for step, frozen in enumerate((False, True, True, False, False)):
            for model in (wrapped.module, plain):
                model.left.requires_grad_(not frozen)
            backward_on_both(wrapped, plain, data(rank, step), "left", "right")
            assert_reduced(wrapped, plain)
            assert (wrapped.module.left.weight.grad is None) is frozen


def check_unfreezing_after_the_wrap(rank):
    for options in MODES:
        for part in ("left", None):
            made = []
            for _ in range(2):
                model = Parts()
                (model.get_submodule(part) if part else model).requires_grad_(False)
                made.append(model)
            wrapped, plain = DistributedDataParallel(made[0], **options), made[1]
            if part:
                backward_on_both(wrapped, plain, data(rank), "left", "right")
                assert_reduced(wrapped, plain)
            for model in (wrapped.module, plain):
                model.requires_grad_(True)
            for step in range(1, 4):
                backward_on_both(wrapped, plain, data(rank, step), "left", "right")
                assert_reduced(wrapped, plain)


def check_unfreezing_past_the_wrapper(rank):
    """The layer is unfrozen and used before the wrapper's next forward."""
    wrapped, plain = both(delay_allreduce=True)
    for model in (wrapped.module, plain):
        model.left.requires_grad_(False)
    backward_on_both(wrapped, plain, data(rank), "left", "right")
    for model in (wrapped.module, plain):
        model.left.requires_grad_(True)
        model.zero_grad()
        model(data(rank, 1), "left", "right").backward()
    assert_reduced(wrapped, plain)


def check_ranks_that_use_different_parameters(rank):
    """No rank waits for another: who lacks a gradient adds zeros to it."""
    for options in MODES:
        wrapped, plain = both(**options)
        for step in range(4):
            heads = ("left",) if (step + rank) % 2 else ("right",)
            backward_on_both(wrapped, plain, data(rank, step), *heads)
            assert_reduced(wrapped, plain)


def check_two_backward_passes_of_one_forward(rank):
    for options in MODES:
        wrapped, plain = both(**options)
        for step in range(3):
            wrapped.zero_grad()
            plain.zero_grad()
            for model in (wrapped, plain):
                hidden = model(data(rank, step), "left", "right")
                hidden.backward(retain_graph=True)
                (hidden * 2).backward()
            assert_reduced(wrapped, plain)


def check_accumulation_without_reduction(rank):
    """A parameter that only an unreduced pass gave a gradient is reduced by the next pass that is reduced."""
    for options in MODES:
        wrapped, plain = both(**options)
        for step in range(3):
            wrapped.zero_grad()
            plain.zero_grad()
            wrapped.disable_allreduce()
            wrapped(data(rank, step), "left").backward()
            with wrapped.no_sync():
                wrapped(data(rank, step), "left").backward()
            wrapped.enable_allreduce()
            wrapped(data(rank, step + 5), "right").backward()
            for head, at in (("left", step), ("left", step), ("right", step + 5)):
                plain(data(rank, at), head).backward()
            assert_reduced(wrapped, plain)


def check_gradients_that_come_twice_in_one_pass(rank):
    """A checkpointed segment runs a backward pass of its own, inside; a weight used in both gets two gradients."""

    class Twice(Parts):
        def forward(self, x):
            first = checkpoint(self.body, x, use_reentrant=True)
            return self.left(self.body(first.tanh() @ torch.ones(6, 4) / 6)).pow(2).mean()

    for options in MODES:
        wrapped, plain = DistributedDataParallel(Twice(), **options), Twice()
        for step in range(3):
            x = data(rank, step).requires_grad_()
            backward_on_both(wrapped, plain, x)
            assert_reduced(wrapped, plain)


def check_a_pass_that_failed(rank):
    """The next pass is reduced as if the failed one had not been."""
    for options in MODES:
        wrapped, plain = both(**options)
        backward_on_both(wrapped, plain, data(rank), "left", "right")

        def fail(_):
            raise ArithmeticError

        x = data(rank, 1).requires_grad_()
        x.register_hook(fail)  # the last gradient of the pass
        with pytest.raises(ArithmeticError):
            wrapped(x, "left", "right").backward()
        for step in (2, 3):
            backward_on_both(wrapped, plain, data(rank, step), "left", "right")
            assert_reduced(wrapped, plain)


def check_a_replaced_layer(rank):
    for options in MODES:
        wrapped, plain = both(**options)
        backward_on_both(wrapped, plain, data(rank), "left")
        for model in (wrapped.module, plain):
            torch.manual_seed(3)
            model.left = nn.Linear(6, 5)
        for step in (1, 2, 3):
            backward_on_both(wrapped, plain, data(rank, step), "left")
            assert_reduced(wrapped, plain)


def check_copies(rank):
    for options in MODES:
        wrapped, plain = both(**options)
        backward_on_both(wrapped, plain, data(rank), "left", "right")
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        for copied in (copy.deepcopy(wrapped), torch.load(file, weights_only=False)):
            for step in (1, 2, 3):
                backward_on_both(copied, plain, data(rank, step), "left", "right")
                assert_reduced(copied, plain)
        again = DistributedDataParallel(wrapped.module, **options)
        backward_on_both(again, plain, data(rank, 4), "left", "right")
        assert_reduced(again, plain)


def check_output_of_any_kind(rank):
    class Holder:
        pass

    class Odd(Parts):
        def forward(self, x):
            holder = Holder()
            holder.loss = super().forward(x, "left")
            return holder

    for options in MODES:
        wrapped, plain = DistributedDataParallel(Odd(), **options), Odd()
        for step in range(2):
            wrapped.zero_grad()
            plain.zero_grad()
            for model in (wrapped, plain):
                model(data(rank, step)).loss.backward()
            assert_reduced(wrapped, plain)


def check_compiled(rank):
    """The wrapper compiled, and a compiled model wrapped."""
    for outside, options in ((True, {"message_size": 1}), (False, {"delay_allreduce": True})):
        plain, model = Parts(), Parts()
        if outside:
            wrapped = DistributedDataParallel(model, **options)
            run = torch.compile(wrapped, backend="aot_eager")
        else:
            wrapped = DistributedDataParallel(torch.compile(model, backend="aot_eager"), **options)
            run = wrapped
        for step in range(2):
            wrapped.zero_grad()
            plain.zero_grad()
            run(data(rank, step), "left").backward()
            plain(data(rank, step), "left").backward()
            for param, mean in zip(wrapped.parameters(), mean_of_ranks(own_gradients(plain)), strict=True):
                assert (param.grad is None) is (mean is None)
                if mean is not None:
                    torch.testing.assert_close(param.grad, mean)


def check_tensors_without_elements(rank):
    class Odd(Parts):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.empty(0))
            self.register_buffer("whole", torch.empty(0, dtype=torch.int64))
            self.register_buffer("flag", torch.tensor(rank == 0))

        def forward(self, x):
            return super().forward(x, "left") + self.none.sum()

    for options in MODES:
        wrapped = DistributedDataParallel(Odd(), **options)
        assert wrapped.module.flag
        for step in range(2):
            wrapped(data(rank, step)).backward()
        assert wrapped.module.none.grad.shape == (0,)


def check_buckets_leave_during_the_pass(rank):
    """Without ``delay_allreduce`` a bucket is on its way as soon as it is full."""
    began = []
    original = dist.all_reduce

    def recording(tensor, *args, **kwargs):
        began.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    for options, during in (({"message_size": 1}, 4), ({"delay_allreduce": True}, 0)):
        wrapped, _ = both(**options)
        for step in range(2):
            seen = []

            def watch(_module, _inputs, out, seen=seen):
                out.register_hook(lambda _grad: seen.append(len(began)))

            hidden = wrapped.module.body.register_forward_hook(watch)
            dist.all_reduce = recording
            began.clear()
            try:
                wrapped(data(rank, step), "left", "right").backward()
            finally:
                dist.all_reduce = original
                hidden.remove()
        # When the gradient of the body's output is there, so are the heads' four gradients.
        assert seen == [during], (options, began)


def check_arithmetic(rank):
    """Buckets and late gradients: divided before and after, in float32, in the gradient's own dtype at the end."""
    for mode in MODES:
        for always, average, before in ((False, True, 1.0), (True, True, 4.0), (True, False, 2.0), (False, True, 2.0)):
            model = nn.Linear(3, 2).half()
            wrapped = DistributedDataParallel(
                model,
                allreduce_always_fp32=always,
                gradient_average=average,
                gradient_predivide_factor=before,
                **mode,
            )
            for step in range(2):
                wrapped.zero_grad()
                torch.manual_seed(step)
                inputs = torch.randn(2, 5, 3).half()
                wrapped(inputs[rank]).sum().backward()
                expected = []
                for each in inputs:
                    grad = torch.autograd.grad(model(each).sum(), model.weight)[0]
                    expected.append((grad.float() if always else grad) * (1.0 / before))
                total = expected[0] + expected[1]
                if average:
                    total = total * (before / 2)
                assert torch.equal(model.weight.grad, total.half())


def check_sparse_gradients_are_refused(rank):
    for options in MODES:
        wrapped = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), **options)
        loss = wrapped(torch.tensor([rank])).sum()
        with pytest.raises(RuntimeError, match="sparse=False"):
            loss.backward()


def check_under_amp(rank):
    """Layers that are unfrozen, two losses, and gradients that only one rank has."""
    for options in MODES:
        for level in ("O0", "O1", "O2", "O3"):
            model = Parts()
            model.left.requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, num_losses=2, loss_scale=64.0, verbosity=0
            )
            wrapped = DistributedDataParallel(model, **options)
            for step in range(4):
                if step == 1:
                    model.left.requires_grad_(True)
                    optimizer.zero_grad()
                wrapped.disable_allreduce()
                with amp.scale_loss(wrapped(data(rank, step), "left", "right"), optimizer, loss_id=0) as scaled:
                    scaled.backward()
                wrapped.enable_allreduce()
                loss = wrapped(data(rank, step), "right", *(["left"] if rank else []))
                with amp.scale_loss(loss, optimizer, loss_id=0) as scaled:
                    scaled.backward(retain_graph=True)
                with amp.scale_loss(loss * 2, optimizer, loss_id=1) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
                for name, value in model.state_dict().items():
                    gathered = [torch.empty_like(value) for _ in range(2)]
                    dist.all_gather(gathered, value.contiguous())
                    assert torch.equal(*gathered), (options, level, step, name)


def check_an_overflow_on_one_rank(rank):
    for level in ("O1", "O2"):
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=64.0, verbosity=0
        )
        wrapped = DistributedDataParallel(model)
        for step in range(3):
            make_step(optimizer, wrapped(data(rank, step), "left") * (torch.inf if rank and step == 1 else 1.0))
            assert amp.step_was_skipped(optimizer) is (step == 1)
            optimizer.zero_grad()


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's checkpoint
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_two_processes(check):
    run_on_two_processes(check)


@pytest.mark.usefixtures("group_of_one")
def test_a_wrapped_model_is_refused_by_initialize_and_unwrapped():
    wrapped = DistributedDataParallel(Parts())
    with pytest.raises(RuntimeError, match="already wrapped in DistributedDataParallel"):
        amp.initialize(wrapped, opt_level="O1")
    assert type(amp.unwrap(wrapped)) is Parts


@pytest.mark.usefixtures("group_of_one")
def test_keywords(capsys):
    wrapped = DistributedDataParallel(Parts(), find_unused_parameters=True, process_group=dist.group.WORLD)
    assert "no effect: find_unused_parameters" in capsys.readouterr().out
    wrapped(torch.ones(1, 4), "left").backward()
    with pytest.raises(TypeError, match="find_unused"):
        DistributedDataParallel(Parts(), find_unused=True)
    for bad in (0, [0]):
        with pytest.raises(ValueError, match="message_size"):
            DistributedDataParallel(Parts(), message_size=bad)
