"""Whether gradients that were multiplied hold an inf or NaN, as a flag on their device: nothing is read here."""

from __future__ import annotations

from operator import attrgetter

import torch

from ampcompat import _torch

_DTYPE = attrgetter("dtype")
_DEVICE_AND_DTYPE = attrgetter("device", "dtype")


class FoundInf:
    """Multiplies gradients and notes any inf or NaN among them, in a 0-dim float32 flag for each device."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, torch.Tensor] = {}

    def multiply(self, grads: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply ``grads``, dense tensors of any device and dtype, by ``factor`` (0-dim float32) in place.

        No host sync.
        """
        alike = len(set(map(_DTYPE, grads))) == 1 and len(set(map(torch.Tensor.get_device, grads))) == 1
        if not alike:  # no gradients, or one kernel call for each device and dtype
            for kind in dict.fromkeys(map(_DEVICE_AND_DTYPE, grads)):
                self.multiply([grad for grad in grads if _DEVICE_AND_DTYPE(grad) == kind], factor)
            return
        device = grads[0].device
        if grads[0].is_complex():
            grads = [torch.view_as_real(grad.conj() if grad.is_conj() else grad) for grad in grads]
        if factor.device != device:
            factor = _torch.moved_to(device, factor)
        flag = self._flags.get(device)
        if flag is None:
            flag = torch.zeros_like(factor)
            self._flags[device] = flag
        _torch.unscale_and_check_(grads, flag, factor)

    def add(self, flag: torch.Tensor) -> None:
        """Note what ``flag``, a 0-dim float32 tensor, says."""
        earlier = self._flags.get(flag.device)
        self._flags[flag.device] = flag if earlier is None else torch.maximum(flag, earlier)

    def flag(self) -> torch.Tensor | None:
        """The flag, not 0 where there was an inf or NaN; None where no gradient was multiplied."""
        flags = list(self._flags.values())
        if len(flags) > 1:  # of several devices
            return _torch.any_of(flags)
        return flags[0] if flags else None
