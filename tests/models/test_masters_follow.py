"""Masters follow their half weights in whole models; ``test_master_states.py`` has the table of who writes what."""

import pytest
import torch
from amp_training import assert_masters_agree, make_step
from internals import masters_by_name
from nets import MASTER_LEVELS, Net, batch, made, train

from ampcompat import amp

pytestmark = pytest.mark.device


def head_master(model):
    return masters_by_name(model.head)["weight"].value


def test_a_zero_has_the_sign_of_its_master():
    """Else the two copies differ in their bits for ever, and every forward would compare them."""
    model, _ = made()
    with torch.no_grad():
        model.head.weight.zero_()
        model(batch())
        model.head.weight.neg_()
    model.state_dict()
    assert torch.equal(model.head.weight.signbit(), head_master(model).signbit())


def test_sync_masters_takes_late_writes_through_data():
    """Of the weight itself, and of what ``state_dict`` exported; an export alone is not a write."""
    model, optimizer = made()
    train(model, optimizer, 10)
    for _ in range(10):
        model(batch())
    model.head.weight.data.fill_(0.5)
    amp.sync_masters(model)
    assert torch.equal(head_master(model).detach(), torch.full((2, 8), 0.5))
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    amp.sync_masters(model)
    assert all(torch.equal(value, exact[name]) for name, value in model.state_dict().items())
    handed = model.state_dict()
    handed["head.weight"].data.mul_(2)
    amp.sync_masters(model)
    assert torch.equal(model.head.weight.detach(), torch.ones(2, 8, dtype=model.head.weight.dtype))
    assert_masters_agree(model, optimizer)


def test_sync_masters_brings_half_buffers_up_to_date_too():
    torch.manual_seed(0)
    model = amp.initialize(Net(), opt_level="O2", keep_batchnorm_fp32=False, verbosity=0)
    saved = model.state_dict()["body.1.running_mean"]
    amp.sync_masters(model)  # settles what was exported
    model.body[1].running_mean.data.fill_(0.5)
    amp.sync_masters(model)
    assert torch.equal(saved, torch.full_like(saved, 0.5))


# -- state dicts that were exported ------------------------------------------------------------------------------------
def test_an_exported_state_dict_does_not_spoil_a_graph():
    """As in plain torch: looking at weights between a forward and its backward changes nothing."""
    model, optimizer = made()
    loss = model(batch()).pow(2).mean()
    model.state_dict()
    loss = loss + model(batch(1)).pow(2).mean()
    make_step(optimizer, loss)
    assert_masters_agree(model, optimizer)


# -- graphs that hold half weights -------------------------------------------------------------------------------------
def judge_and_generator(level):
    """Two linear layers of small whole numbers, which half holds exactly, each with an optimizer."""
    judge = torch.nn.Linear(2, 1, bias=False)
    generator = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        judge.weight.copy_(torch.tensor([[1.0, 2.0]]))
        generator.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (judge, generator)]
    return amp.initialize([judge, generator], optimizers, opt_level=level, loss_scale=256.0, verbosity=0)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_graph_goes_backward_after_a_step_of_what_it_holds(level):
    """GANs written for torch before 1.5 trained under apex: the gradient is computed with the stepped weights."""
    (judge, generator), (judges, generators) = judge_and_generator(level)
    noise = torch.tensor([[1.0, 1.0]])
    fake = generator(noise)
    judged = judge(fake).sum()
    with amp.scale_loss(judge(fake.detach()).sum(), judges) as scaled:
        scaled.backward()
    judges.step()  # the gradient is fake, (1, 3): the weights become (0, -1)
    assert judge.weight.tolist() == [[0.0, -1.0]]
    judges.zero_grad()
    with amp.scale_loss(judged, [generators, judges]) as scaled:
        scaled.backward()
    (of_generator,) = amp.master_params(generators)
    (of_judge,) = amp.master_params(judges)
    assert of_generator.grad.tolist() == [[0.0, 0.0], [-1.0, -1.0]]
    assert of_judge.grad.tolist() == [[1.0, 3.0]]
    generators.step()
    assert generator.weight.tolist() == [[1.0, 0.0], [3.0, 2.0]]


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_graph_that_is_kept_over_two_steps(level):
    (judge, generator), (judges, generators) = judge_and_generator(level)
    loss = judge(generator(torch.tensor([[1.0, 1.0]]))).sum()
    for _ in range(2):
        with amp.scale_loss(loss, [judges, generators]) as scaled:
            scaled.backward(retain_graph=True)
        judges.step()
        generators.step()
        judges.zero_grad()
        generators.zero_grad()
    # The judge loses (1, 3), which the graph has kept, twice. The generator's rows lose the judge's weights, first
    # (1, 2), then (0, -1) as stepped, since the graph holds the weights themselves.
    assert judge.weight.tolist() == [[-1.0, -4.0]]
    assert generator.weight.tolist() == [[0.0, -1.0], [1.0, 0.0]]


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_a_script_writes_to_a_half_weight_still_ends_its_graphs(level):
    """As in plain torch, and under apex: only what is pushed from masters moves no version."""
    (judge, generator), (judges, generators) = judge_and_generator(level)
    loss = judge(generator(torch.tensor([[1.0, 1.0]]))).sum()
    with torch.no_grad():
        judge.weight.mul_(2)
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        amp.scale_loss(loss, [judges, generators]) as scaled,
    ):
        scaled.backward()


# -- load_state_dict ---------------------------------------------------------------------------------------------------


def Net_state(seed):
    torch.manual_seed(seed)
    return Net().state_dict()


def test_load_into_a_submodule_partial_and_not_strict():
    model, optimizer = made()
    source = Net_state(7)
    model.head.load_state_dict({"weight": source["head.weight"], "bias": source["head.bias"]})
    assert torch.equal(model.state_dict()["head.weight"], source["head.weight"])
    result = model.load_state_dict({"body.0.weight": source["body.0.weight"], "alien": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["alien"]
    assert "body.0.bias" in result.missing_keys
    assert torch.equal(model.state_dict()["body.0.weight"], source["body.0.weight"])
    assert_masters_agree(model, optimizer)


def test_a_load_that_fails_leaves_shapes_and_invariant():
    model, optimizer = made()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**Net_state(7), "head.weight": torch.zeros(5, 5)})
    assert_masters_agree(model, optimizer)
    train(model, optimizer)


def test_loading_its_own_state_dict_changes_no_bit():
    model, optimizer = made()
    train(model, optimizer, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(model.state_dict())
    model(batch())
    before["body.1.num_batches_tracked"] += 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) or "running" in name, name
    assert_masters_agree(model, optimizer)


# -- dtype and device --------------------------------------------------------------------------------------------------
def test_gradients_go_along_when_the_dtype_is_put_right():
    model, optimizer = made()
    with amp.scale_loss(model(batch()).pow(2).mean() * 1e-3, optimizer) as scaled:
        scaled.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.float()
    with pytest.warns(UserWarning, match="the dtype of the model is managed by amp"):
        model(batch())
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in model.parameters()]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), want, strict=True))


def test_a_parameter_that_was_taken_away_is_not_loaded():
    model, optimizer = made()
    model.head.bias = None
    incoming = {name: value for name, value in Net_state(7).items() if name != "head.bias"}
    model.load_state_dict(incoming)
    assert torch.equal(model.state_dict()["head.weight"], incoming["head.weight"])
    assert model(batch()).isfinite().all()


def test_a_new_optimizer_takes_the_same_masters():
    model, optimizer = made()
    train(model, optimizer, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    second = torch.optim.Adam(model.parameters(), lr=0.01)
    model, second = amp.initialize(model, second, opt_level="O2", verbosity=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {id(p) for p in amp.master_params(second)} == {id(p) for p in amp.master_params(optimizer)}
    train(model, second)
    assert_masters_agree(model, second)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_the_weight_that_belongs_to_a_master(level):
    """The optimizer holds them in another order than the model, in groups."""
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": params[2:]}, {"params": params[:2]}], lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = [amp.model_param(master) for master in amp.master_params(optimizer)]
    assert all(one is other for one, other in zip(found, [*params[2:], *params[:2]], strict=True))
    assert all(amp.model_param(param) is param for param in params)
    with pytest.raises(TypeError, match="it takes one parameter - pass each of"):
        amp.model_param(amp.master_params(optimizer))
