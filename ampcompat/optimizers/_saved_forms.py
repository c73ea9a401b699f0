"""Which saved states each optimizer reads, and how those of others become its own.

A state dict does not name the optimizer that wrote it, and many use the same names with another meaning: moments that
one optimizer counts a param and another a group, first moments with and without averaging. :data:`FORMS` tells them
apart; :data:`READS` is the table of what is converted. All else is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch.optim.optimizer import StateDict

from ampcompat._types import ParamGroup


@dataclass(frozen=True)
class Form:
    """A form of saved states, known by names in it.

    Attributes:
        written_by: The optimizers that write it, for messages.
        group: Names that each group has.
        state: Names that each param has that has state at all.
        only: Values that names of a group must have, where it has them: others change what the state means.
        renamed: Names of a group, by the names that they have in ours.
        constructor: Names of a group that are arguments of the constructor here, which must agree.
    """

    written_by: str
    group: frozenset[str]
    state: frozenset[str] = frozenset()
    only: Mapping[str, object] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    constructor: tuple[str, ...] = ()

    def matches(self, groups: list[ParamGroup], states: list[dict[str, Any]]) -> bool:
        """Return whether the state dict with these groups, and these states of params, has this form."""
        return all(self.group <= group.keys() for group in groups) and all(self.state <= each.keys() for each in states)


_MOMENTS: Final = frozenset(("exp_avg", "exp_avg_sq"))
_COUNTED_MOMENTS: Final = _MOMENTS | {"step"}

NOVOGRAD: Final = Form("apex.optimizers.FusedNovoGrad", frozenset(("betas", "norm_type")), frozenset(("exp_avg",)))
LAMB: Final = Form("apex.optimizers.FusedLAMB", frozenset(("betas", "grad_averaging")), _MOMENTS)
TORCH_ADAM: Final = Form(
    "torch.optim.Adam or AdamW",
    frozenset(("betas", "amsgrad")),
    _COUNTED_MOMENTS,
    only={"amsgrad": False, "maximize": False},
)
TRANSFORMERS_ADAM: Final = Form(
    "transformers.AdamW",
    frozenset(("betas", "correct_bias")),
    _COUNTED_MOMENTS,
    renamed={"bias_correction": "correct_bias"},
)
CONTRIBUTED_ADAM: Final = Form(
    "apex.contrib.optimizers.FusedAdam",
    frozenset(("betas", "bias_correction", "max_grad_norm")),
    _COUNTED_MOMENTS,
    constructor=("max_grad_norm",),
)
ADAM: Final = Form("apex.optimizers.FusedAdam", frozenset(("betas", "bias_correction")), _MOMENTS)
SGD: Final = Form(
    "apex.optimizers.FusedSGD or torch.optim.SGD",
    frozenset(("momentum", "dampening", "nesterov")),
    only={"maximize": False},
)
TORCH_ADAGRAD: Final = Form(
    "torch.optim.Adagrad",
    frozenset(("lr_decay",)),
    frozenset(("sum", "step")),
    only={"lr_decay": 0, "maximize": False},
)
ADAGRAD: Final = Form("apex.optimizers.FusedAdagrad", frozenset(("eps", "weight_decay")), frozenset(("sum",)))

#: Every form that has a name, the most particular first: the first that matches counts. The second part is never read;
#: it is there for messages.
FORMS: Final = (
    *(NOVOGRAD, LAMB, TORCH_ADAM, TRANSFORMERS_ADAM, CONTRIBUTED_ADAM, ADAM, SGD, TORCH_ADAGRAD),
    Form("torch.optim.NAdam", frozenset(("momentum_decay",))),
    Form("torch.optim.RMSprop", frozenset(("alpha", "centered"))),
    Form("torch.optim.Adadelta", frozenset(("rho",))),
    Form("torch.optim.Adamax", frozenset(("betas",)), frozenset(("exp_inf",))),
    Form("torch.optim.RAdam", frozenset(("betas", "decoupled_weight_decay"))),
    Form("an Adam such as torch.optim.SparseAdam", frozenset(("betas",)), _COUNTED_MOMENTS),
    ADAGRAD,
)

#: What each optimizer reads.
READS: Final[Mapping[str, tuple[Form, ...]]] = {
    "FusedAdam": (ADAM, CONTRIBUTED_ADAM, TORCH_ADAM, TRANSFORMERS_ADAM),
    "FusedLAMB": (LAMB,),
    "FusedNovoGrad": (NOVOGRAD,),
    "FusedSGD": (SGD,),
    "FusedAdagrad": (ADAGRAD, TORCH_ADAGRAD),
}

#: Options of torch's optimizers, without a meaning here, or refused by :attr:`Form.only`.
_OPTIONS_OF_TORCH: Final = frozenset(
    (
        *("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"),
        *("lr_decay", "initial_accumulator_value"),
    )
)


def in_own_form(
    optimizer: torch.optim.Optimizer,
    kind: str,
    state_dict: StateDict,
    counts_steps: Literal["in groups", "in params", "not at all"],
) -> StateDict:
    """Return ``state_dict`` in the form that ``optimizer`` writes itself; neither is changed.

    Args:
        optimizer: The optimizer that will load it.
        kind: Its row of :data:`READS`.
        state_dict: What an optimizer's ``state_dict()`` returned.
        counts_steps: Where ``optimizer`` keeps its step counts.

    Raises:
        ValueError: Another optimizer's state, which is not converted; or options of it, or step counts, that
            ``optimizer`` cannot have.
    """
    name = type(optimizer).__name__
    groups: list[ParamGroup] = [dict(group) for group in state_dict["param_groups"]]
    states: dict[Any, Any] = dict(state_dict["state"])
    for key in (key for group in groups for key in group["params"] if key in states):
        # torch's SGD writes None for a buffer that it has not made yet.
        states[key] = {entry: value for entry, value in states[key].items() if value is not None}
    form = _form_of(name, READS[kind], groups, states)
    for group, own_group in zip(groups, optimizer.param_groups, strict=False):  # torch refuses another number of groups
        _convert_options(optimizer, form, group, own_group)
        own_states = [states[key] for key in group["params"] if states.get(key)]
        if counts_steps == "in groups":
            _count_in_group(name, form, group, own_states)
        elif counts_steps == "in params":
            _count_in_params(name, form, group, own_states)
        elif "step" in form.state:
            for state in own_states:
                del state["step"]
    return {**state_dict, "state": states, "param_groups": groups}


def _form_of(name: str, reads: tuple[Form, ...], groups: list[ParamGroup], states: dict[Any, Any]) -> Form:
    """Return the form of a state dict, if it is among ``reads``."""
    with_state = [states[key] for group in groups for key in group["params"] if states.get(key)]
    form = next((form for form in FORMS if form.matches(groups, with_state)), None)
    if form in reads:
        return form
    readable = ", of ".join(form.written_by for form in reads)
    in_state = ", ".join(sorted({key for state in with_state for key in state})) or "nothing"
    in_groups = ", ".join(sorted({key for group in groups for key in group} - {"params"}))
    writer = "an optimizer that it does not know" if form is None else form.written_by
    raise ValueError(
        f"{name}.load_state_dict got the state of {writer} (params: {in_state}; groups: {in_groups}) - it reads that of"
        f" {readable} - build the optimizer that wrote it, or load the model alone and begin with new state."
    )


def _convert_options(optimizer: torch.optim.Optimizer, form: Form, group: ParamGroup, own_group: ParamGroup) -> None:
    """Leave the options in ``group`` that the optimizer's own groups have; what is missing is as it is now."""
    name = type(optimizer).__name__
    for option, readable in form.only.items():
        if option in group and group[option] != readable:
            raise ValueError(
                f"{name}.load_state_dict got a state of {form.written_by} with {option}={group[option]!r} - {name} has"
                f" {option}={readable!r} alone - go on with the optimizer that wrote it."
            )
    for option in form.constructor:
        if option not in optimizer.defaults and group[option] != getattr(optimizer, option):
            raise ValueError(
                f"{name}.load_state_dict got a state of {form.written_by} with {option}={group[option]!r} - here it is"
                f" the constructor's, {getattr(optimizer, option)!r} - build {name}(..., {option}={group[option]!r})."
            )
    for ours, theirs in form.renamed.items():
        group[ours] = group.pop(theirs)
    for option in {*form.constructor, *_OPTIONS_OF_TORCH} - optimizer.defaults.keys():
        group.pop(option, None)
    for option in optimizer.defaults:
        if option in own_group:
            group.setdefault(option, own_group[option])


def _count_in_group(name: str, form: Form, group: ParamGroup, states: list[dict[str, Any]]) -> None:
    """Move the step counts of params into their group."""
    counts = {int(state.pop("step")) for state in states if "step" in state}
    if "step" in group:
        counts.add(int(group["step"]))
    if states and len(counts) != 1:
        raise ValueError(
            f"{name}.load_state_dict got a state of {form.written_by} with the step counts {sorted(counts)} in a"
            f" group - {name} counts the steps of a whole group - go on with the optimizer that wrote it, or leave one"
            ' count in it, as the "step" of the group.'
        )
    if counts:
        group["step"] = counts.pop()


def _count_in_params(name: str, form: Form, group: ParamGroup, states: list[dict[str, Any]]) -> None:
    """Move the step count of a group into its params."""
    of_group = group.pop("step", None)
    for state in states:
        count = state.get("step", of_group)
        if count is None or (of_group is not None and int(of_group) != int(count)):
            raise ValueError(
                f"{name}.load_state_dict got a state of {form.written_by} with {of_group} steps in a group and {count}"
                f' in its params - it needs one count - write the right one into the "step" of every param.'
            )
        state["step"] = int(count)
