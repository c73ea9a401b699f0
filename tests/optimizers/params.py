"""Parameters, their gradients, and a comparison to the bit, for the tests of optimizers."""

import torch

SHAPES = ((4, 3), (4,))


def make_params(dtype=torch.float32, seed=0, shapes=SHAPES):
    """Random parameters, the same for a seed."""
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def fill_grads(params, step, factor=1.0):
    """Give parameters random gradients, the same for a step."""
    torch.manual_seed(50 + step)
    for p in params:
        p.grad = (torch.randn(p.shape) * factor).to(p.dtype)


def same(first, second):
    """Whether two lists of tensors are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
