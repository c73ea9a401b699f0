"""What each event does to gradients, masters and casts: the state tables, as data.

Each table has two readers. Tests compare its rows with the events that they try; and ``python docs/architecture.py``
writes it into the docstring of the module that implements it (:data:`SHOWN_IN`), or else into docs/architecture.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Table(NamedTuple):
    """A table: its heads, and its rows, each of which begins with an event (or with where code stands)."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def events(self) -> list[str]:
        """The first cell of each row."""
        return [row[0] for row in self.rows]


#: The gradients of one set of tensors. EMPTY is NONE with one warning more.
GRADIENTS: Final = Table(
    head=("event", "NONE, EMPTY", "UNSCALED", "PENDING", "LOST"),
    rows=(
        ("block begins", "saved", "saved", "rescaled", "saved"),
        ("block ends", "UNSCALED", "added: UNSCALED", "added: UNSCALED", "LOST"),
        ("block ends with an overflow", "UNSCALED, noted", "UNSCALED, noted", "UNSCALED, noted", "LOST"),
        ("block gives no gradient", "EMPTY", "UNSCALED", "UNSCALED", "LOST"),
        ("block gives other sets only", "NONE", "UNSCALED", "UNSCALED", "LOST"),
        ("block raises", "NONE", "UNSCALED, as before", "scaled ones are lost", "LOST"),
        ("end of the block raises", "LOST", "LOST", "LOST", "LOST"),
        ("ends with `delay_unscale`", "PENDING", "PENDING", "PENDING", "LOST"),
        ("ends in DDP's `no_sync`", "PENDING", "PENDING", "PENDING", "LOST"),
        ("`step`", "NONE", "used, or skipped: NONE", "unscaled first", "skipped: NONE"),
        ("`step` of one of two users", "NONE", "used: still UNSCALED", "unscaled first", "skipped: LOST"),
        ("`zero_grad`", "NONE", "NONE", "NONE", "LOST"),
        ("`p.grad` cleared", "NONE", "the rest is used", "the rest is unscaled", "LOST"),
        ("`p.grad` edited", "NONE", "used, not by masters", "unscaled", "LOST"),
        ("`load_state_dict`", "NONE", "UNSCALED", "PENDING", "LOST"),
    ),
)

#: The two copies of a weight.
MASTERS: Final = Table(
    head=("event", "half (the model's tensor)", "value (the float32 master)"),
    rows=(
        ("`initialize`", "rounded from float32", "the float32 weight, to the bit"),
        ("`optimizer.step`", "rounded from value", "stepped by the optimizer"),
        ("`load_state_dict`", "rounded from what was loaded", "what was loaded"),
        ("half written, its version moves", "kept", "takes the elements that differ"),
        ("half written through `data`", "kept", "takes the elements that differ"),
        ("half written through an older alias", "kept until the next step", "at `amp.sync_masters` alone"),
        ("half written, and written back", "kept", "kept"),
        ("value written", "rounded from value", "kept"),
        ("both written, with no look between", "kept", "takes the elements that differ"),
        ("parameter replaced in its module", "stays, of no model; a warning", "stays with its optimizer"),
        ("replaced, and added to an optimizer", "stays, of no model", "stays; the new one has its own"),
        ("buffer assigned in its module", "the new buffer, as it is", "made anew from it, at the next save"),
        ("`model.to(device)`", "moved", "follows"),
        ("other strides (`memory_format=`)", "laid out anew", "keeps its strides, for fused optimizers"),
        ("`model.float()` and the like", "cast back", "takes the elements that differ"),
        ("deepcopy, pickle", "copied", "copied"),
        ("`initialize` at another level", "float32 again, from value", "dropped"),
    ),
)

#: Where functions are cast.
CASTS: Final = Table(
    head=("code", "casts"),
    rows=(
        ("device types that hold no params of an initialized model", "off"),
        ("the forward of an initialized model", "the casts of the call that owns it, in any thread"),
        (
            "anywhere else in the thread that called `initialize`",
            'the casts of the latest call at O1 or O4 ("ambient")',
        ),
        ("the autograd engine", "off"),
        ("Python `autograd.Function` backward bodies", "the casts of the forward"),
        ("`optimizer.step`", "off; inside its closure as outside"),
        ("`disable_casts()`", "off"),
        ("a user's own `torch.autocast` region", "the user's"),
    ),
)

#: Which attributes change when, in one step at O2 with a dynamic scale.
STATE_CHANGES: Final = Table(
    head=("", "`LossScaler`", "`GradientSet`", "`LastStep`", "`Block`", "`Master`, and its tensors"),
    rows=(
        ("`model(x)`", "-", "-", "-", "-", "-"),
        ("block begins", "-", "`block`: this one", "-", "`entered`; `scale`: that of now; `loss`: let go", "-"),
        ("`backward`", "-", "-", "-", "-", "`half.grad`: scaled"),
        (
            "block ends",
            "`_overflows.last`: the flag; `core.scale`: a new tensor; `core.clean_passes`: one more, or 0",
            "`block`: None; `state`: UNSCALED; `overflows`: and the flag; `users`: and the optimizer",
            "-",
            "-",
            "`value.grad`: the sum, unscaled; `added_grad`: `half.grad` and its version",
        ),
        (
            "`step`, made",
            "-",
            "`state`: NONE; `overflows`: none; `users`: none",
            "`gradient_used`",
            "-",
            "`value`: stepped; `half`: rounded from it; `half_version`; `value_version`; `value.grad`: None;"
            " `added_grad`: None",
        ),
        (
            "`step`, skipped",
            "-",
            "`state`: NONE; `overflows`: none; `users`: none; `may_be_non_finite`: True",
            "`gradient_used`; `skipped`: True",
            "-",
            "`value.grad`: None; `added_grad`: None",
        ),
        ("`zero_grad`, step made", "-", "-", "-", "-", "`half.grad`: None"),
        ("`zero_grad`, step skipped", "-", "`may_be_non_finite`: False", "-", "-", "`half.grad`: None"),
    ),
)

#: Names of the tables on the page, by the module of ``ampcompat/amp`` that shows them in its docstring, in this order.
SHOWN_IN: Final[dict[str, tuple[str, ...]]] = {
    "scaling/gradient_sets": ("gradients",),
    "half/masters": ("masters",),
    "casts/ambience": ("casts",),
}
TABLES: Final[dict[str, Table]] = {
    "gradients": GRADIENTS,
    "masters": MASTERS,
    "casts": CASTS,
    "changes": STATE_CHANGES,
}
