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


#: The gradient of a master, that is, of a half parameter at levels with masters. State NONE is the same after a step
#: that was made and after one that was skipped.
MASTER_GRADIENTS: Final = Table(
    head=("master's gradient", "NONE", "UNSCALED", "PENDING"),
    rows=(
        ("block begins", "what the script put there", "kept", "p.grad is rescaled to its scale"),
        ("block ends", "UNSCALED", "added: UNSCALED", "p.grad is added: UNSCALED"),
        ("block ends with an overflow", "the same, and noted", "the same, and noted", "the same, and noted"),
        ("block gives no gradient", "NONE (EMPTY)", "UNSCALED", "UNSCALED"),
        ("block raises", "NONE", "as before the block", "p.grad is lost; a warning"),
        ("end of the block raises", "LOST", "LOST", "LOST"),
        ("ends with `delay_unscale`", "PENDING", "kept, beside PENDING", "PENDING"),
        ("ends in DDP's `no_sync`", "PENDING", "kept, beside PENDING", "PENDING"),
        ("`step`", "moves nothing", "used, or skipped: NONE", "unscaled first"),
        ("`zero_grad`", "NONE", "NONE", "NONE"),
        ("`p.grad` cleared", "NONE", "NONE", "what is left is unscaled"),
        ("`p.grad` edited", "NONE", "kept; a warning", "the edited one is unscaled"),
        ("`load_state_dict`", "NONE", "UNSCALED", "PENDING"),
    ),
)

#: The gradient of a float32 parameter, which is ``p.grad`` itself. State NONE differs by what the last step was.
FLOAT32_GRADIENTS: Final = Table(
    head=("float32 gradient", "NONE, step made", "NONE, step skipped", "UNSCALED", "PENDING"),
    rows=(
        ("block begins", "goes aside", "goes aside", "goes aside", "is rescaled"),
        ("block ends", "added to what stayed", "added: still not finite", "added", "unscaled"),
        (
            "block ends with an overflow",
            "the same, and noted",
            "the same, and noted",
            "the same, and noted",
            "the same, noted",
        ),
        ("block gives no gradient", "stays", "stays", "stays", "unscaled"),
        ("block raises", "as before the block", "as before the block", "as before the block", "lost; a warning"),
        ("end of the block raises", "LOST", "LOST", "LOST", "LOST"),
        ("ends with `delay_unscale`", "aside; PENDING", "aside; PENDING", "aside; PENDING", "PENDING"),
        ("ends in DDP's `no_sync`", "aside; PENDING", "aside; PENDING", "aside; PENDING", "PENDING"),
        ("`step`", "used again", "skipped, until it is clean", "used, or skipped", "unscaled first"),
        ("`zero_grad`", "cleared", "cleared", "cleared", "cleared"),
        ("`p.grad` cleared", "moves nothing", "moves nothing", "moves nothing", "moves nothing"),
        ("`p.grad` edited", "used as it is", "used if it is finite", "used as it is", "unscaled"),
        ("`load_state_dict`", "stays", "stays", "stays", "stays"),
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
        ("half written, and written back", "kept", "kept"),
        ("value written", "rounded from value", "kept"),
        ("both written, with no look between", "kept", "takes the elements that differ"),
        ("parameter replaced in its module", "stays, of no model; a warning", "stays with its optimizer"),
        ("replaced, and added to an optimizer", "stays, of no model; a warning", "stays; the new one has its own"),
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
        ("the forward of an initialized model", "those of the call that owns it, in any thread"),
        ("anywhere else in the thread that called `initialize`", 'those of the latest call at O1 or O4 ("ambient")'),
        ("the autograd engine", "off"),
        ("Python `autograd.Function` backward bodies", "those of the forward"),
        ("`optimizer.step`", "off; inside its closure as outside"),
        ("`disable_casts()`", "off"),
        ("a user's own `torch.autocast` region", "the user's"),
    ),
)

#: Which attributes change when, in one step at O2 with a dynamic scale.
STATE_CHANGES: Final = Table(
    head=("", "`LossScaler`", "`AmpOptimizerState` (stash)", "`Block`", "`Master`, and its tensors"),
    rows=(
        ("`model(x)`", "-", "-", "-", "-"),
        ("block begins", "-", "`block`: this one", "`entered`; `scale`: that of now; `loss`: let go", "-"),
        ("`backward`", "-", "-", "-", "`half.grad`: scaled"),
        (
            "block ends",
            "`_overflows.last`: the flag; `core.scale`: a new tensor; `core.clean_passes`: one more, or 0",
            "`block`: None; `gradients`: UNSCALED; `overflows`: and the flag",
            "-",
            "`value.grad`: the sum, unscaled; `added_grad`: `half.grad` and its version",
        ),
        (
            "`step`, made",
            "-",
            "`gradients`: NONE; `overflows`: none; `last_step.first_gradient`",
            "-",
            "`value`: stepped; `half`: rounded from it; `half_version`; `value_version`; `value.grad`: None;"
            " `added_grad`: None",
        ),
        (
            "`step`, skipped",
            "-",
            "`gradients`: NONE; `overflows`: none; `earlier_overflows`: and these; `last_step.first_gradient`;"
            " `last_step.skipped`: True",
            "-",
            "`value.grad`: None; `added_grad`: None",
        ),
        ("`zero_grad`, step made", "-", "-", "-", "`half.grad`: None"),
        ("`zero_grad`, step skipped", "-", "`earlier_overflows`: none", "-", "`half.grad`: None"),
    ),
)

#: Names of the tables on the page, by the module of ``ampcompat/amp`` that shows them in its docstring, in this order.
SHOWN_IN: Final[dict[str, tuple[str, ...]]] = {
    "scaling/block": ("gradients", "float32"),
    "half/masters": ("masters",),
    "casts/ambience": ("casts",),
}
TABLES: Final[dict[str, Table]] = {
    "gradients": MASTER_GRADIENTS,
    "float32": FLOAT32_GRADIENTS,
    "masters": MASTERS,
    "casts": CASTS,
    "changes": STATE_CHANGES,
}
