"""What subclasses of the fused optimizers, and callers of their ``step``, find as they did in apex."""

import pytest
import torch
from params import fill_grads, make_params

from ampcompat import amp_C
from ampcompat.multi_tensor_apply import multi_tensor_applier
from ampcompat.optimizers import FusedAdam, FusedSGD


class ByHand(FusedSGD):
    """With a step in the manner of copies of apex's: momentum by ``get_momentums``, one kernel for each group."""

    @torch.no_grad()
    def step(self):
        noop = torch.zeros(1, dtype=torch.int)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            momentums, first_run = self.get_momentums(params)
            multi_tensor_applier(
                amp_C.multi_tensor_sgd,
                noop,
                [[p.grad for p in params], params, momentums],
                group["weight_decay"],
                group["momentum"],
                group["dampening"],
                group["lr"],
                group["nesterov"],
                first_run,
                self.wd_after_momentum,
                1.0,
            )


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_a_step_of_its_own_by_get_momentums_is_sgd(dampening):
    ours, plain = make_params(), make_params()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "weight_decay": 0.01}
    first, second = ByHand(ours, **options), torch.optim.SGD(plain, **options)
    for step in range(4):
        fill_grads(ours, step)
        fill_grads(plain, step)
        first.step()
        second.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # float32 rounding, by another order of operations


def test_get_momentums_says_whether_the_last_is_new():
    params = make_params(torch.float16)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    assert optimizer.get_momentums([]) == ([], True)
    buffers, first_run = optimizer.get_momentums(params[:1])
    assert first_run
    assert buffers[0] is optimizer.state[params[0]]["momentum_buffer"]
    assert (buffers[0].dtype, buffers[0].abs().sum()) == (torch.float16, 0)
    again, first_run = optimizer.get_momentums(params)
    assert first_run, "of the last, as in apex"
    assert again[0] is buffers[0]
    assert not optimizer.get_momentums(params)[1]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
def test_adam_takes_a_grad_scaler(unscale, capturable):
    ours, plain = make_params(), make_params()
    first, second = FusedAdam(ours, lr=0.1, capturable=capturable), FusedAdam(plain, lr=0.1)
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**4)
    for step, overflow in enumerate([True, False, True, False]):
        scaler.scale(torch.zeros(()))  # makes the scale
        fill_grads(ours, step, scaler.get_scale())
        fill_grads(plain, step)
        if overflow:
            ours[0].grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(first)
        assert first.step(lambda: 3.0, grad_scaler=scaler) == 3.0
        scaler.update()
        if not overflow:
            second.step()
    # The count is on the device, and with it the bias corrections in float32.
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 2.0**2
    assert first.state_dict()["param_groups"][0]["step"] == 2


def test_adams_step_refuses_other_keywords():
    with pytest.raises(TypeError, match="unexpected keyword argument 'scaler'"):
        FusedAdam(make_params()).step(scaler=None)


def test_masters_for_a_step_of_its_own():
    params = [*make_params(torch.float16), torch.nn.Parameter(torch.ones(2))]
    optimizer = FusedAdam(params, master_weights=True)
    masters = optimizer.param_groups_master
    assert optimizer.param_groups_master is masters
    for p, master in zip(params, masters[0]["params"], strict=True):
        assert torch.equal(p.detach().float(), master)
        assert (master.dtype, master.requires_grad) == (torch.float32, False)
        assert master.data_ptr() != p.data_ptr()
    assert not hasattr(FusedAdam(params), "param_groups_master"), "as in apex"
