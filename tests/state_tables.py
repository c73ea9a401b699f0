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


#: The gradients of an optimizer.
GRADIENTS: Final = Table(
    head=("event", "gradients"),
    rows=(
        ("block begins", "older ones are set aside; unaveraged and delayed ones stay, multiplied by the scale"),
        ("block ends", "new ones are unscaled, older ones added"),
        ("block ends with an overflow", "the same; each optimizer that holds them skips a step"),
        ("block gives no gradient", "older ones come back"),
        (
            "ends with `delay_unscale`",
            "unscaled, older ones added; the next block adds to them, and moves the scale",
        ),
        ("ends in DDP's `no_sync`", "unscaled; DDP averages them with the gradients of the next block"),
        ("block raises", "as it ends, with what the failed pass has added; the scale moves with the next block"),
        ("end of the block raises", "cleared (None), older ones too"),
        ("`step`", "used; cleared in masters"),
        ("`step` after an overflow", "not used, once; cleared in masters"),
        ("`step` of one of two holders", "used; shared masters keep them"),
        ("`zero_grad`", "cleared; an overflow skips the next step all the same"),
        ("`p.grad` cleared", "cleared, in masters too; an overflow skips the next step all the same"),
        ("`p.grad` edited", "used; masters do not see it"),
        ("`load_state_dict`", "as they are"),
        ("a param joins with a gradient", "dropped where its session has scaled losses"),
    ),
)

#: The two copies of a weight.
MASTERS: Final = Table(
    head=("event", "half (the model's tensor)", "value (the float32 master)"),
    rows=(
        ("`initialize`", "rounded from float32", "the float32 weight, to the bit"),
        ("`optimizer.step`", "rounded from value", "stepped by the optimizer"),
        ("`load_state_dict`", "rounded from what was loaded", "what was loaded"),
        ("half written, also through `data`", "kept", "takes the elements that differ"),
        ("half written past torch, as through numpy", "kept until the next step", "at `amp.sync_masters` alone"),
        ("half written, and written back", "kept", "kept"),
        ("value written, also through `data`", "rounded from value", "kept"),
        ("both written", "kept", "takes the elements that differ"),
        ("attribute set on either", "has it", "has it"),
        ("`half.requires_grad` set", "kept", "follows, at `amp.master_params`"),
        ("parameter replaced in its module", "stays, of no model; a save warns", "stays with its optimizer"),
        ("replaced, and added to an optimizer", "stays, of no model", "stays; the new one has its own"),
        ("buffer assigned in its module", "the new buffer, as it is", "a new master is made at the next save"),
        ("`model.to(device)`", "moved", "follows"),
        ("other strides (`memory_format=`)", "laid out anew", "keeps its strides, for fused optimizers"),
        ("`model.float()` and the like", "cast back", "takes the elements that differ"),
        ("deepcopy, pickle", "copied", "copied"),
        ("`initialize` at another level", "float32 again, from value", "dropped"),
    ),
)

#: Where functions are cast. The first row that fits decides; of regions in one another, the innermost.
CASTS: Final = Table(
    head=("code (the first match wins)", "casts"),
    rows=(
        ("device types that hold no params of an initialized model", "off"),
        ("a user's own `torch.autocast` region", "the user's"),
        ("`disable_casts()`", "off"),
        ("Python `autograd.Function` backward bodies", "the casts of the forward"),
        ("the autograd engine", "off"),
        ("`optimizer.step`", "off; inside its closure as outside"),
        ("the forward of an initialized model", "the casts of its session, in any thread"),
        (
            "anywhere else in the thread that called `initialize`",
            'the casts of the latest session at O1 or O4 ("ambient")',
        ),
    ),
)

#: Which attributes change when, in one step at O2 with a dynamic scale.
STATE_CHANGES: Final = Table(
    head=("", "`LossScaler`", "`optimizer._amp_stash`", "the process", "`Master`, and its tensors"),
    rows=(
        ("`model(x)`", "-", "-", "-", "-"),
        ("block begins", "-", "-", "`open_blocks`: this one added", "-"),
        ("`backward`", "-", "-", "-", "`half.grad`: scaled"),
        (
            "block ends",
            "`last_pass`: the flag; `clean_passes`: one more",
            "`overflows`: the flag added",
            "`open_blocks`: this one removed",
            "`value.grad`: the sum, unscaled; `grad_shown`: True",
        ),
        (
            "block ends, overflow",
            "`last_pass`: the flag; `scale`: half of it; `clean_passes`: 0",
            "`overflows`: the flag added",
            "`open_blocks`: this one removed",
            "`value.grad`: the sum, with inf or NaN; `grad_shown`: True",
        ),
        (
            "`step`, made",
            "-",
            "`overflows`: none",
            "-",
            "`value`: stepped; `half`: rounded from it; `value_version`; `value.grad`: None; `grad_shown`: False",
        ),
        (
            "`step`, skipped",
            "-",
            "`overflows`: none; `skipped`: True",
            "-",
            "`value.grad`: None; `grad_shown`: False",
        ),
        ("`zero_grad`", "-", "-", "-", "`half.grad`: None"),
    ),
)

#: Names of the tables on the page, by the module of ``ampcompat/amp`` that shows them in its docstring, in this order.
SHOWN_IN: Final[dict[str, tuple[str, ...]]] = {
    "scaling/block": ("gradients",),
    "half/masters": ("masters",),
    "casts/ambience": ("casts",),
}
TABLES: Final[dict[str, Table]] = {
    "gradients": GRADIENTS,
    "masters": MASTERS,
    "casts": CASTS,
    "changes": STATE_CHANGES,
}
