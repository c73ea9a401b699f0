"""The arguments of the contributed optimizers' ``step``: gradients and copies of the params from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from ampcompat._types import ParamGroup

#: Tensors of the one group there is, in the order of its params, or a list of such lists, one for each group.
OfParams: TypeAlias = Iterable[Tensor | None] | Sequence[Sequence[Tensor | None] | None] | None


class Row(NamedTuple):
    """A param with a gradient.

    Attributes:
        param: The param, which is stepped.
        grad: Its gradient, multiplied by the scale.
        output: What gets the new values in its own dtype, or None.
    """

    param: Tensor
    grad: Tensor
    output: Tensor | None


def rows_of(
    optimizer: str, groups: list[ParamGroup], grads: OfParams, output_params: OfParams
) -> list[tuple[ParamGroup, list[Row]]]:
    """Return the params with gradients of each group; where ``grads`` has none, a param's own gradient counts.

    Raises:
        ValueError: A list has not as many entries as there are groups, or params in its group.
        RuntimeError: A gradient is sparse.
    """
    found: list[tuple[ParamGroup, list[Row]]] = []
    grads_by_group = _by_group(optimizer, "grads", grads, groups)
    outputs_by_group = _by_group(optimizer, "output_params", output_params, groups)
    for group, group_grads, outputs in zip(groups, grads_by_group, outputs_by_group, strict=True):
        rows: list[Row] = []
        for param, given, output in zip(group["params"], group_grads, outputs, strict=True):
            grad = param.grad if given is None else given
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(
                    f"{optimizer} does not support sparse gradients - a param of shape {tuple(param.shape)} has one -"
                    " build its embedding with sparse=False, or give it to torch.optim.SparseAdam."
                )
            rows.append(Row(param, grad, output))
        found.append((group, rows))
    return found


def _by_group(optimizer: str, name: str, given: OfParams, groups: list[ParamGroup]) -> list[Sequence[Tensor | None]]:
    counts = [len(group["params"]) for group in groups]
    if given is None:
        return [[None] * count for count in counts]
    entries: list[Any] = list(given)
    is_of_one_group = not any(isinstance(entry, (list, tuple)) for entry in entries)
    by_group = [entries] if is_of_one_group else entries
    lists: list[Sequence[Tensor | None]] = []
    for entry, count in zip(by_group, counts, strict=False):
        lists.append([None] * count if entry is None else list(entry))
    sizes = [len(tensors) for tensors in lists]
    if len(by_group) != len(groups) or sizes != counts:
        raise ValueError(
            f"{optimizer}.step got {name} of {sizes} tensors - its groups have {counts} params - pass a list for each"
            " group, with a tensor or None for each param."
        )
    return lists
