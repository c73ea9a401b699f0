"""Step counts: the int that scripts read in ``group["step"]``, and the tensor that the device counts in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat._types import ParamGroup


@dataclass
class _Count:
    """The count of one group: ``value`` (0-dim float32) is exact, ``shown`` is what ``group["step"]`` was set to."""

    group: ParamGroup
    value: Tensor
    shown: int

    def show(self, step: int) -> None:
        """Set ``group["step"]``, unless the script has written it in the meantime."""
        if self.group.get("step") == self.shown:
            self.group["step"] = self.shown = step


class StepCounts:
    """Counts the steps of an optimizer's groups in ``group["step"]``, an int at all times.

    Reproduces the count of ``apex/optimizers/fused_lamb.py: FusedLAMB.step`` (and its siblings), which left out skipped
    steps because amp read the overflow flag on the host before each of them. Where only the device knows of a skip,
    the exact count is kept there for the update rules. ``group["step"]`` then counts a step as made until the flag has
    reached the host by an asynchronous copy, which is looked at in the next step: no host sync. On the CPU the flag is
    read at once. A value that the script writes to ``group["step"]`` is counted on from.
    """

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}
        self._report: tuple[_torch.HostCopy, list[tuple[_Count, int]]] | None = None

    def advance(self, groups: list[ParamGroup], found_inf: Tensor | None, on_device: bool) -> None:
        """Count a step of each group that has params.

        Args:
            groups: The param groups.
            found_inf: 0-dim float32, 1 if the step is skipped; None if it is not.
            on_device: Count on the device even without ``found_inf``, for CUDA graphs.
        """
        self._apply_report()
        filled = [group for group in groups if group["params"]]
        if not filled:
            return
        device = filled[0]["params"][0].device  # one for the counts of all groups: one copy brings them to the host
        skipped: float | None = None if on_device else 0.0
        if found_inf is not None:
            skipped = _torch.host_value(found_inf)
            found_inf = _torch.moved_to(device, found_inf)
        counts: dict[int, _Count] = {}
        for group in filled:
            shown = int(group.get("step", 0))
            count = self._counts.get(id(group))
            if count is None and (on_device or found_inf is not None):
                # A tensor made on the host would have to be copied: a host sync.
                count = _Count(group, torch.full((), float(shown), dtype=torch.float32, device=device), shown)
            group["step"] = shown + (0 if skipped else 1)
            if count is not None:
                count.value = count.value.to(device)
                if shown != count.shown:  # written by the script
                    count.value.fill_(float(shown))
                    self._report = None
                count.value.add_(1.0 if found_inf is None else 1.0 - found_inf)
                count.shown = group["step"]
                counts[id(group)] = count
        self._counts = counts
        if counts and skipped is None:
            self._start_report()

    def are_on_device(self, groups: list[ParamGroup]) -> bool:
        """Return whether the device counts the steps of every group that has params."""
        return all(id(group) in self._counts for group in groups if group["params"])

    def of(self, group: ParamGroup, device: torch.device) -> int | Tensor:
        """Return the number of the current step of ``group``: an int, or 0-dim float32 on ``device``."""
        count = self._counts.get(id(group))
        if count is not None:
            return _torch.moved_to(device, count.value)
        return int(group.get("step", 0))

    def make_exact(self) -> None:
        """Make every ``group["step"]`` exact, replays of CUDA graphs included: one host sync if the device counts."""
        self._report = None
        counts = list(self._counts.values())
        if counts:
            held = torch.stack([count.value for count in counts]).to("cpu").tolist()
            for count, value in zip(counts, held, strict=True):
                count.show(int(value))

    def _start_report(self) -> None:
        # The next copy starts when this one has arrived: the host may be several steps ahead of the device.
        if self._report is None and not _torch.is_capturing() and not _torch.in_fake_mode():
            counts = list(self._counts.values())
            copy = _torch.HostCopy([count.value for count in counts])
            self._report = copy, [(count, count.shown) for count in counts]

    def _apply_report(self) -> None:
        if self._report is None or not self._report[0].arrived():
            return
        copy, counts = self._report
        self._report = None
        for (count, shown_then), value in zip(counts, copy.read(), strict=True):
            count.show(count.shown - shown_then + int(value))
