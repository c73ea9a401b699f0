"""Casts on, as at O1, for a region of a test, on the device on which it makes its tensors."""

from contextlib import contextmanager

import torch

from ampcompat.amp.casts import installation


def here():
    """The type of the device on which tensors are made: ``cuda`` under ``--on-cuda``."""
    return torch.get_default_device().type


@contextmanager
def casts_on(device_type=None, dtype=torch.float16, cache=False):
    """The rules installed and autocast on for ``device_type``; flags and rules as before afterwards."""
    device_type = device_type or here()
    flags = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    installation.install([device_type])
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, flags[0])
        torch.set_autocast_dtype(device_type, flags[1])
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()
        installation.uninstall()


@contextmanager
def engine_without_casts():
    """Casts off while the autograd engine runs, as ambient casts see to."""
    device_type = here()
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)
