"""What apex did and amp does not, by the rows of ``docs/divergences.json``: these tests are expected to fail.

Beside each stands what amp does.
"""

import warnings

import pytest
import torch
from core_kit import masters, same, start, train


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
