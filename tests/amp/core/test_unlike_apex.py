"""What apex did and amp does not, by the rows of ``docs/divergences.json``: these tests are expected to fail.

Beside each stands what amp does.
"""

import pickle
import pickletools
import warnings

import pytest
import torch
from amp_training import batch, loss_of, masters, same, start, train

from ampcompat import amp


def half(*shape):
    return torch.ones(*shape, dtype=torch.half)


@pytest.mark.divergence("tensor-softmax")
def test_the_softmax_of_a_tensor_keeps_its_dtype():
    _held = start("O1")
    assert half(2, 2).softmax(-1).dtype == torch.half


def test_both_forms_of_softmax_are_float32():
    _held = start("O1")
    assert half(2, 2).softmax(-1).dtype == torch.nn.functional.softmax(half(2, 2), -1).dtype == torch.float32


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def scripted(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@pytest.mark.on_cpu
@pytest.mark.divergence("scripted-casts")
def test_scripted_code_is_not_cast():
    _held = start("O1")
    assert scripted(add)(half(2, 2), half(2, 2)).dtype == torch.half


@pytest.mark.on_cpu
def test_scripted_code_is_cast_by_torchscript():
    _held = start("O1")
    assert scripted(add)(half(2, 2), half(2, 2)).dtype == torch.float32
    assert add(half(2, 2), half(2, 2)).dtype == torch.half


def masters_after_a_swap(saves):
    """The masters before weights were swapped out and back, and after."""
    model, optimizer = start("O2")
    train(model, optimizer, 2)
    before = masters(optimizer)
    kept = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    if saves:
        model.state_dict()
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)
    model.state_dict()  # masters follow
    return before, masters(optimizer)


@pytest.mark.divergence("swapped-weights-saved")
def test_masters_keep_their_bits_while_weights_are_swapped_and_saved():
    assert same(*masters_after_a_swap(saves=True))


def test_masters_keep_their_bits_while_weights_are_swapped():
    """After a save they have the bits of half weights."""
    assert same(*masters_after_a_swap(saves=False))
    _, after = masters_after_a_swap(saves=True)
    assert all(torch.equal(p, p.half().float()) for p in after if p.dim() == 2)


def test_swapping_the_values_of_the_state_dict_loses_no_bit():
    model, optimizer = start("O2")
    train(model, optimizer, 2)
    before = masters(optimizer)
    values = dict(model.state_dict())
    kept = {name: value.clone() for name, value in values.items()}
    for value in values.values():
        value.zero_()
    model.state_dict()
    for name, value in values.items():
        value.copy_(kept[name])
    assert same(before, masters(optimizer))


def stepped_in_its_block():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    before = model.weight.detach().clone()
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
        optimizer.step()
    return model.weight.detach() - before


@pytest.mark.divergence("step-in-block")
def test_adam_steps_inside_its_block():
    """It divides by the size of a gradient, whose scale does not matter then."""
    torch.testing.assert_close(stepped_in_its_block(), torch.full((1, 2), -0.1))


def test_a_step_inside_its_block_is_refused():
    with pytest.raises(RuntimeError, match="inside its scale_loss block"):
        stepped_in_its_block()


def squared():
    _held = start("O1")
    x = torch.full((2,), 3.0, dtype=torch.half)
    x **= 2
    return x


@pytest.mark.divergence("in-place-power")
def test_an_in_place_power_gives_the_name_to_a_float32_tensor():
    assert squared().dtype == torch.float32


def test_an_in_place_power_of_half_is_refused():
    with pytest.raises(NotImplementedError, match=r"In-place pow_ on a torch.float16 tensor"):
        squared()


def written_through_its_state_dict(level):
    model, _ = start(level)
    name, value = next(iter(model.state_dict().items()))
    value.copy_(torch.ones_like(value))
    model(batch()[0])
    return model.get_parameter(name)


@pytest.mark.divergence("state-dict-copies-at-o3")
def test_a_write_to_a_value_of_the_state_dict_changes_the_model_at_o3():
    assert (written_through_its_state_dict("O3") == 1).all()


def test_a_write_to_a_value_of_the_state_dict_changes_the_model_at_the_other_levels():
    assert (written_through_its_state_dict("O2") == 1).all()
    assert (written_through_its_state_dict("O1") == 1).all()
    assert not (written_through_its_state_dict("O3") == 1).any()


@pytest.mark.divergence("delayed-blocks")
def test_gradients_of_a_delayed_block_stay_scaled():
    (delayed, _), (plain, _) = after_a_block(delay_unscale=True), after_a_block()
    assert same([p.grad for p in delayed], [128 * p.grad for p in plain])


def test_gradients_of_a_delayed_block_are_unscaled():
    (delayed, scaled), (plain, _) = after_a_block(delay_unscale=True), after_a_block()
    assert same([p.grad for p in delayed], [p.grad for p in plain])
    assert not scaled


def after_a_block(**kwargs):
    """The parameters of a model after a block, and whether their gradients are said to be scaled."""
    model, optimizer = start("O1", loss_scale=128.0)
    with amp.scale_loss(loss_of(model), optimizer, **kwargs) as scaled:
        scaled.backward()
    return list(model.parameters()), optimizer._amp_stash.params_have_scaled_gradients


def names_in_the_file_of(model):
    return {name for _, name, _ in pickletools.genops(pickle.dumps(model)) if isinstance(name, str)}


@pytest.mark.divergence("saved-models")
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_file_of_a_model_loads_without_amp(level):
    model, _ = start(level)
    assert not any("ampcompat" in name for name in names_in_the_file_of(model))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_file_of_an_unwrapped_model_loads_without_amp(level):
    model, _ = start(level)
    assert not any("ampcompat" in name for name in names_in_the_file_of(amp.unwrap(model)))
