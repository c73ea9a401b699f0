"""Ranges of each layer's results and of their gradients, of a batch that is run again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.modules import module as hooks

from ampcompat.amp.casts.trees import tensors_in
from ampcompat.tools.columns import aligned
from ampcompat.tools.data import named
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.record import Record
from ampcompat.tools.explain.replay import run_again, run_backward
from ampcompat.tools.explain.said import Said
from ampcompat.tools.explain.tensors import readable


@dataclass(kw_only=True)
class LayerRange:
    """Describe the results of one module in one pass; the shares are of 1."""

    module: str
    type: str
    direction: str = named("pass")
    dtype: str
    largest: float
    smallest: float
    zeros: float
    infs: float
    nans: float


@dataclass(kw_only=True)
class LayerRanges(Said):
    """List the ranges of every layer of a model in one batch."""

    kind = "ranges"
    model: str
    step: int
    scale: float
    rows: list[LayerRange]


@dataclass
class Row:
    """The results of one module, forward or backward, all of its calls together.

    Attributes:
        module: Qualified name; "" for the model itself.
        kind: Its class name.
        direction: "forward", or "backward" for the gradients of the results.
        dtype: Theirs.
        largest: Largest finite magnitude.
        smallest: Smallest magnitude that is not 0; inf where all are.
        zeros, infs, nans: How many elements are.
        count: How many there are.
    """

    module: str
    kind: str
    direction: str
    dtype: torch.dtype
    largest: float = 0.0
    smallest: float = float("inf")
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    count: int = 0

    def see(self, tensor: torch.Tensor) -> None:
        """Add what is in ``tensor``. Reads the device."""
        size = tensor.detach().abs()
        kept = size[torch.isfinite(size) & (size > 0)]
        self.zeros += int((size == 0).sum())
        self.infs += int(torch.isinf(size).sum())
        self.nans += int(torch.isnan(size).sum())
        self.count += size.numel()
        if kept.numel():
            self.largest = max(self.largest, float(kept.amax()))
            self.smallest = min(self.smallest, float(kept.amin()))

    @property
    def data(self) -> LayerRange:
        """The row for JSON."""
        return LayerRange(
            module=self.module,
            type=self.kind,
            direction=self.direction,
            dtype=dtype_name(self.dtype),
            largest=self.largest,
            smallest=self.smallest if self.smallest < float("inf") else 0.0,
            zeros=self.zeros / self.count,
            infs=self.infs / self.count,
            nans=self.nans / self.count,
        )


class Ranges:
    """Rows, in the order in which modules ended."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.rows: dict[tuple[str, str, torch.dtype], Row] = {}

    def see(self, module: torch.nn.Module, tensor: torch.Tensor, direction: str) -> None:
        """Add one result of ``module``, or the gradient of one."""
        if not readable(tensor) or not tensor.numel():
            return
        name, kind = self.names.get(id(module), "?"), type(module).__name__
        self.rows.setdefault((name, direction, tensor.dtype), Row(name, kind, direction, tensor.dtype)).see(tensor)

    def after_forward(self, module: torch.nn.Module, args: object, output: object) -> None:
        """Look at what ``module`` returned, and at its gradients when they come."""
        for tensor in tensors_in(output):
            self.see(module, tensor, "forward")
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad, module=module: self.see(module, grad, "backward")
                )


def measure(record: Record, model: torch.nn.Module) -> Ranges:
    """Run ``record`` of ``model`` again, backward included, and look at every module's results."""
    ranges = Ranges(model)
    with run_again(record, model) as (args, kwargs, leaves):
        handle = hooks.register_module_forward_hook(ranges.after_forward)
        try:
            output = model.forward(*args, **kwargs)
        finally:
            handle.remove()
        ranges.after_forward(model, args, output)  # its forward is called past the hooks
        run_backward(record, model, tensors_in(output), leaves)
    return ranges


def ranges_message(ranges: Ranges, model: str, step: int, scale: float) -> LayerRanges:
    """The table."""
    cells = [["module", "type", "pass", "dtype", "largest", "smallest", "zeros", "inf", "nan"]]
    rows = [row.data for row in ranges.rows.values()]
    for row in rows:
        sizes = [f"{row.largest:.3g}", f"{row.smallest:.3g}"]
        shares = [_percent(share) for share in (row.zeros, row.infs, row.nans)]
        cells.append([row.module or "(model)", row.type, row.direction, row.dtype, *sizes, *shares])
    head = f"ranges of {model} in the batch of step {step}, run again (loss scale {scale:g})."
    table = [f"  {line}" for line in aligned(cells)]
    return LayerRanges(head="\n".join([head, *table]), model=model, step=step, scale=scale, rows=rows)


def _percent(share: float) -> str:
    return "0" if not share else f"{100 * share:.3g} %"
