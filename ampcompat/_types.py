"""Types that several packages share, the table of half dtypes, and what counts as an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict

import torch


class HalfDtype(NamedTuple):
    """A row of :data:`HALF`.

    Attributes:
        names: What ``AMPCOMPAT_DTYPE`` calls it.
        has_range_of_float32: Whether losses need no scale in it.
    """

    names: tuple[str, ...]
    has_range_of_float32: bool


#: The dtypes that "half" stands for.
HALF = {
    torch.float16: HalfDtype(("float16", "fp16", "half"), has_range_of_float32=False),
    torch.bfloat16: HalfDtype(("bfloat16", "bf16"), has_range_of_float32=True),
}
HALF_DTYPES = tuple(HALF)
#: A param group, as torch has it: ``"params"``, and hyperparameters by name.
ParamGroup: TypeAlias = dict[str, Any]
#: What an optimizer is made of. torch's ``ParamsT`` is a union of iterables: mypy cannot infer the type of a list of
#: groups that is passed for it.
Params: TypeAlias = Iterable[torch.Tensor | ParamGroup | tuple[str, torch.Tensor]]
#: ``state`` of an optimizer, as torch has it.
ParamState: TypeAlias = defaultdict[torch.Tensor, Any]


class Options(TypedDict, total=False):
    """The keywords of ``amp.initialize`` after ``opt_level``, for its overloads; its docstring says what they are."""

    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool | None
    patch_torch_functions_type: torch.dtype | None
    keep_batchnorm_fp32: bool | Literal["True", "False"] | None
    master_weights: bool | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float
    keep_fp32: Any


class Optimizer(Protocol):
    """What amp needs of an optimizer (torch's own, or a wrapper such as LARC), and what it sets on one."""

    param_groups: list[dict[str, Any]]
    _amp_wrapped: bool  # for good: the wrappers of its methods stay
    _amp_stepping: bool  # while an optimizer that steps by another is stepping
    _opt_called: bool  # LR schedulers ask it whether there was a step
    grad_scale: torch.Tensor | None  # both as torch.amp.GradScaler lends them
    found_inf: torch.Tensor
    state: MutableMapping[Any, Any]
    step: Callable[..., object]
    zero_grad: Callable[..., object]
    add_param_group: Callable[..., object]


def is_optimizer(value: object) -> bool:
    """Whether ``value`` is an optimizer, or has what amp needs of one."""
    names = ("param_groups", "state", "step", "zero_grad", "add_param_group")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)
