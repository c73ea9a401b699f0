"""Random numbers of a test's own, on the device on which it makes its tensors."""

import torch


def seeded(seed):
    """A generator that starts at ``seed``: torch draws numbers on a device with a generator of that device alone."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
