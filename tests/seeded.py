"""Random numbers of a test's own, on the device on which it makes its tensors."""

import torch


def randn(*shape):
    """Normal numbers that are the same on every device: the CPU's generator, which ``manual_seed`` sets, draws them."""
    return torch.randn(*shape, device="cpu").to(torch.get_default_device())


def seeded(seed):
    """A generator that starts at ``seed``: torch draws numbers on a device with a generator of that device alone."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
