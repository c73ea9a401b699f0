"""Who writes a half weight or its master, and that the other side follows: DESIGN's invariant, bitwise."""

import warnings

import pytest
import torch
from internals import masters_by_name
from nets import MASTER_LEVELS, Net, Tied, batch, masters_agree, train
from torch import nn

from ampcompat import amp


def initialized(level="O2", kind=Net, lr=0.01, make=torch.optim.SGD):
    torch.manual_seed(0)
    model = kind()
    optimizer = make(model.parameters(), lr=lr)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def head_master(model):
    return masters_by_name(model.head)["weight"].value


# -- writers of the model: each changes the first row of model.head.weight and nothing else ----------------------------
def in_place(model, row):
    with torch.no_grad():
        model.head.weight[0].copy_(row)


def through_detach(model, row):
    model.head.weight.detach()[0] = row


def foreach(model, row):
    target = model.head.weight.detach()
    torch._foreach_copy_([target[0]], [row])


def inference_mode(model, row):
    with torch.inference_mode():
        model.head.weight[0] = row


def through_data(model, row):
    model.head.weight.data[0] = row


def through_numpy(model, row):
    model.head.weight.detach().view(torch.int16).numpy()[0] = row.view(torch.int16).numpy()


def vector_to_parameters(model, row):
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector([model.head.weight])
        vector[: row.numel()] = row
        nn.utils.vector_to_parameters(vector, [model.head.weight])


def assigned_data(model, row):
    data = model.head.weight.data.clone()
    data[0] = row
    model.head.weight.data = data


def replaced(model, row):
    weight = nn.Parameter(model.head.weight.detach().clone())
    with torch.no_grad():
        weight[0] = row
    model.head.weight = weight


def replaced_in_float32(model, row):
    weight = nn.Parameter(model.head.weight.detach().float())
    with torch.no_grad():
        weight[0] = row
    model.head.weight = weight


def swapped_tensors(model, row):
    other = nn.Parameter(model.head.weight.detach().clone())
    with torch.no_grad():
        other[0] = row
        model.head.weight.copy_(other)


WRITERS = [
    in_place,
    through_detach,
    foreach,
    inference_mode,
    through_data,
    through_numpy,
    vector_to_parameters,
    assigned_data,
    replaced,
    replaced_in_float32,
    swapped_tensors,
]


@pytest.mark.cover(2)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("then", ["forward", "step"])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_write_to_the_model_reaches_the_master(level, write, then, steps_before):
    model, optimizer = initialized(level, lr=0.0 if then == "step" else 0.01)
    train(model, optimizer, steps_before)
    old = head_master(model).detach().clone()
    half = model.head.weight.dtype
    row = (torch.arange(8) / 8).to(half)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacement is loud: see below
        write(model, row)
        if then == "forward" and write not in (replaced, replaced_in_float32):
            model(batch())
        else:
            train(model, optimizer)  # lr 0 or small: the written row stays what it is to half precision
    masters_agree(model, optimizer)
    master = head_master(model)
    tolerance = 0 if then == "step" else 0.02
    torch.testing.assert_close(master.detach()[0], row.float(), rtol=0, atol=tolerance)
    if then == "step" and write is not replaced_in_float32:
        assert torch.equal(master.detach()[1], old[1]), "elements that nobody wrote lost their low bits"
    assert any(p is master for p in amp.master_params(optimizer))


@pytest.mark.parametrize("write", WRITERS)
def test_late_writes_reach_the_master(write):
    """At the next forward where a version counter or data pointer shows them, else when the model is saved."""
    model, optimizer = initialized("O2")
    train(model, optimizer, 12)
    row = (torch.arange(8) / 8).to(model.head.weight.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacement is loud: see below
        write(model, row)
        if write not in (through_data, through_numpy):  # these move neither a version counter nor the data pointer
            model(batch())
            assert torch.equal(head_master(model).detach()[0], row.float())
        assert torch.equal(model.state_dict()["head.weight"][0], row.float())
    masters_agree(model, optimizer)


def test_a_zero_has_the_sign_of_its_master():
    """Else the two sides differ in their bits for ever, and every forward would compare them."""
    model, _ = initialized()
    with torch.no_grad():
        model.head.weight.zero_()
        model(batch())
        model.head.weight.neg_()
    model(batch())
    assert torch.equal(model.head.weight.signbit(), head_master(model).signbit())


def test_a_replaced_parameter_is_saved_and_trained():
    """It is what ``state_dict`` has right after the replacement, and the first step trains it."""
    model, optimizer = initialized(lr=1e-3)
    model.head.weight = nn.Parameter(torch.full((2, 8), 0.25).half())
    with pytest.warns(UserWarning, match="'weight' of a Linear was replaced"):
        assert torch.equal(model.state_dict()["head.weight"], torch.full((2, 8), 0.25))
    model.head.load_state_dict({"weight": torch.full((2, 8), 1 / 3), "bias": torch.zeros(2)})
    assert torch.equal(model.state_dict()["head.weight"], torch.full((2, 8), 1 / 3))
    amp._amp_state.loss_scalers[0]._loss_scale = 128.0  # the first scale overflows here
    train(model, optimizer, 1)
    assert not amp.step_was_skipped(optimizer)
    masters_agree(model, optimizer)
    assert 0 < (model.state_dict()["head.weight"] - 1 / 3).abs().max() < 0.01


def test_replacement_by_another_shape_warns():
    """The warning says that the optimizer does not train the new parameter."""
    model, optimizer = initialized()
    model.head = model.head
    model.head.weight = nn.Parameter(torch.zeros(3, 8))
    model.head.bias = nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="does not train the new one"):
        train(model, optimizer)


def test_wgan_clipping_after_every_step_holds():
    for clip in (lambda p: p.data.clamp_(-0.01, 0.01), lambda p: p.detach().clamp_(-0.01, 0.01)):
        model, optimizer = initialized(lr=0.1)
        for step in range(8):
            train(model, optimizer, seed=step)
            for param in model.parameters():
                clip(param)
        model(batch())
        masters_agree(model, optimizer)
        for param in model.parameters():
            assert param.abs().max() <= float(torch.tensor(0.01).half())  # 0.01 rounds up in half


def test_a_fused_step_of_half_weights_is_noticed():
    """A fused step moves no version counter: the values are compared."""
    model, optimizer = initialized()
    twin = torch.optim.AdamW([model.head.weight], lr=0.1, fused=True)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = model.head.weight.detach().clone()
    twin.step()
    wanted = model.head.weight.detach().clone()
    assert not torch.equal(wanted, before)
    model.head.weight.grad = None
    model(batch())
    masters_agree(model, optimizer)
    assert torch.equal(head_master(model).detach().half(), wanted)


def test_sync_masters_finds_late_writes_through_data():
    model, optimizer = initialized()
    train(model, optimizer, 10)
    for _ in range(10):
        model(batch())
    model.head.weight.data.fill_(0.5)
    assert amp.sync_masters(model) == 1
    masters_agree(model, optimizer)
    assert torch.equal(head_master(model).detach(), torch.full((2, 8), 0.5))
    assert amp.sync_masters(model) == 0


def test_sync_masters_counts_writes_only():
    """Tensors that ``state_dict`` handed out count only once they were written to."""
    model, optimizer = initialized()
    train(model, optimizer, 8)
    handed = model.state_dict()
    assert amp.sync_masters(model) == 0
    handed = model.state_dict()
    handed["head.weight"].data.mul_(2)
    assert amp.sync_masters(model) == 1
    masters_agree(model, optimizer)


def test_sync_masters_brings_half_buffers_up_to_date_too():
    torch.manual_seed(0)
    model = amp.initialize(Net(), opt_level="O2", keep_batchnorm_fp32=False, verbosity=0)
    saved = model.state_dict()["body.1.running_mean"]
    amp.sync_masters(model)  # settles what was handed out
    model.body[1].running_mean.data.fill_(0.5)
    assert amp.sync_masters(model) == 0  # parameters that were written
    assert torch.equal(saved, torch.full_like(saved, 0.5))


# -- writers of the master ---------------------------------------------------------------------------------------------
WAYS = [(how, steps) for how in ("copy_", "data", "state_dict", "state_dict data") for steps in (0, 1, 10)]
# Past amp.master_params a .data write is found by value, which is looked at in the first steps only.
WAYS += [("group data", 0), ("group data", 1)]


@pytest.mark.parametrize(("how", "steps_before"), WAYS)
def test_a_write_to_the_master_reaches_the_model(how, steps_before):
    model, optimizer = initialized()
    train(model, optimizer, steps_before)
    wanted = [torch.randn_like(p) for p in amp.master_params(optimizer)]
    model(batch())
    if how.startswith("state_dict"):
        names = [name for name, _ in model.named_parameters()]
        state = model.state_dict()
        for name, value in zip(names, wanted, strict=True):
            (state[name].data if how.endswith("data") else state[name]).copy_(value)
    elif how == "group data":
        for param, value in zip(optimizer.param_groups[0]["params"], wanted, strict=True):
            param.data.copy_(value)
    else:
        for param, value in zip(amp.master_params(optimizer), wanted, strict=True):
            if how == "data":
                param.data.copy_(value)
            else:
                param.detach().copy_(value)
    model(batch())
    for param, value in zip(amp.master_params(optimizer), wanted, strict=True):
        assert torch.equal(param, value)
    masters_agree(model, optimizer)


def test_a_handed_out_state_dict_does_not_spoil_a_graph():
    """As in plain torch: looking at weights between a forward and its backward changes nothing."""
    model, optimizer = initialized()
    loss = model(batch()).pow(2).mean()
    model.state_dict()
    loss = loss + model(batch(1)).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    masters_agree(model, optimizer)


def test_a_write_through_it_does():
    """As in plain torch: the graph would go backward with weights that its forward has not seen."""
    model, optimizer = initialized()
    loss = model(batch().requires_grad_()).pow(2).mean()
    model.state_dict()["body.0.weight"].mul_(0.5)
    model(batch())
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        amp.scale_loss(loss, optimizer) as scaled,
    ):
        scaled.backward()


# -- load_state_dict ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["before steps", "between steps", "inside accumulation"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_load_state_dict_at_any_time(level, when, assign):
    model, optimizer = initialized(level)
    torch.manual_seed(7)
    source = Net().state_dict()
    if when == "between steps":
        train(model, optimizer, 2)
    if when == "inside accumulation":
        with amp.scale_loss(model(batch()).pow(2).mean(), optimizer) as scaled:
            scaled.backward()
    model.load_state_dict(source, assign=assign)
    for name, value in model.state_dict().items():
        assert torch.equal(value, source[name]), name
    masters_agree(model, optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    train(model, optimizer)
    for old, new in zip(before, amp.master_params(optimizer), strict=True):
        # assign=True puts new float32 parameters into batch norm, which no optimizer knows, as in plain torch.
        assert not torch.equal(old, new) or (assign and old.shape == (8,))
    masters_agree(model, optimizer)
    assert torch.equal(source["head.weight"], Net_state(7)["head.weight"]), "the loaded dict itself was trained"


def Net_state(seed):
    torch.manual_seed(seed)
    return Net().state_dict()


def test_load_into_a_submodule_partial_and_not_strict():
    model, optimizer = initialized()
    source = Net_state(7)
    model.head.load_state_dict({"weight": source["head.weight"], "bias": source["head.bias"]})
    assert torch.equal(model.state_dict()["head.weight"], source["head.weight"])
    result = model.load_state_dict({"body.0.weight": source["body.0.weight"], "alien": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["alien"]
    assert "body.0.bias" in result.missing_keys
    assert torch.equal(model.state_dict()["body.0.weight"], source["body.0.weight"])
    masters_agree(model, optimizer)


def test_a_load_that_fails_leaves_shapes_and_invariant():
    model, optimizer = initialized()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**Net_state(7), "head.weight": torch.zeros(5, 5)})
    masters_agree(model, optimizer)
    train(model, optimizer)


def test_loading_its_own_state_dict_changes_no_bit():
    model, optimizer = initialized()
    train(model, optimizer, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(model.state_dict())
    model(batch())
    before["body.1.num_batches_tracked"] += 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) or "running" in name, name
    masters_agree(model, optimizer)


# -- dtype and device --------------------------------------------------------------------------------------------------
def test_gradients_go_along_when_the_dtype_is_put_right():
    model, optimizer = initialized()
    with amp.scale_loss(model(batch()).pow(2).mean() * 1e-3, optimizer) as scaled:
        scaled.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.float()
    with pytest.warns(UserWarning, match="the dtype of the model is managed by amp"):
        model(batch())
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in model.parameters()]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), want, strict=True))


def test_a_parameter_that_was_taken_away_is_not_loaded():
    model, optimizer = initialized()
    model.head.bias = None
    incoming = {name: value for name, value in Net_state(7).items() if name != "head.bias"}
    model.load_state_dict(incoming)
    assert torch.equal(model.state_dict()["head.weight"], incoming["head.weight"])
    assert model(batch()).isfinite().all()


@pytest.mark.parametrize("move", [nn.Module.float, nn.Module.double, lambda m: m.to(torch.float32), nn.Module.bfloat16])
def test_changing_the_models_dtype_is_put_right_loudly(move):
    model, optimizer = initialized(kind=Tied)
    train(model, optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    move(model)
    with pytest.warns(UserWarning, match="the dtype of the model is managed by amp"):
        model(batch())
    assert model.encoder.weight.dtype == torch.float16
    masters_agree(model, optimizer)
    if move is not nn.Module.bfloat16:
        for a, b in zip(before, amp.master_params(optimizer), strict=True):
            assert torch.equal(a, b.float())
    train(model, optimizer)
    masters_agree(model, optimizer)


def test_half_again_changes_nothing():
    model, optimizer = initialized(kind=Tied)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    model.half()
    model(batch())
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    train(model, optimizer)


# -- what trains changes -----------------------------------------------------------------------------------------------


def test_a_new_optimizer_takes_the_same_masters():
    model, optimizer = initialized()
    train(model, optimizer, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    second = torch.optim.Adam(model.parameters(), lr=0.01)
    model, second = amp.initialize(model, second, opt_level="O2", verbosity=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {id(p) for p in amp.master_params(second)} == {id(p) for p in amp.master_params(optimizer)}
    train(model, second)
    masters_agree(model, second)
