"""Numbers on their way to the host."""

from __future__ import annotations

from typing import Any

import torch


def is_capturing() -> bool:
    """Whether work is being recorded for a CUDA graph: the host may ask the device nothing."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def moved_to(device: torch.device, number: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``number``, a flag, a scale or a count, on ``device``; a host sync where it goes from another one to the CPU.

    ``to("cpu", non_blocking=True)`` returns before the copy has arrived: torch then takes pinned memory for it
    (``pin_out`` in its ``TensorConversions.cpp``), and an op on the CPU would read what was there before.
    """
    return number.to(device, dtype, non_blocking=device.type != "cpu")


class HostCopy:
    """Numbers of a device on their way to host memory; starting the copy does not wait for the device.

    While a CUDA graph is captured, nothing is copied and the numbers are zeros.

    Args:
        values: 0-dim tensors of one dtype and device.
    """

    def __init__(self, values: list[torch.Tensor]) -> None:
        device = values[0].device
        self._event: torch.Event | None = None
        if is_capturing():  # a replay runs no Python that could read the copy
            self._host = torch.zeros(len(values), dtype=values[0].dtype, device="cpu")
            return
        streams: Any = getattr(torch, device.type, object())
        has_streams = hasattr(streams, "Event") and hasattr(streams, "current_stream")
        if device.type != "cpu" and has_streams:
            self._host = torch.stack(values).to("cpu", non_blocking=True)  # pinned memory, by torch's own choice
            self._event = streams.Event()
            self._event.record(streams.current_stream(device))
        else:  # nothing says when an asynchronous copy has arrived
            self._host = torch.stack(values).to("cpu")

    def arrived(self) -> bool:
        """Whether :meth:`read` need not wait."""
        return self._event is None or (not is_capturing() and bool(self._event.query()))

    def read(self) -> list[float]:
        """The numbers; waits for the device where they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def host_value(number: torch.Tensor) -> float | None:
    """The value of a 0-dim tensor in host memory; None where it lies elsewhere, so that nothing waits for a device."""
    return number.item() if number.is_cpu else None
