"""The rule in force for an op on a device, and the page of them.

``python -m ampcompat.amp.op_table > docs/op_lists.md`` writes the page.
"""

from __future__ import annotations

import sys
from typing import Final

from ampcompat import _torch
from ampcompat.amp import lists, wrappers
from ampcompat.amp.overloads import ATEN, LEFT, RULES, Rule

UNLISTED: Final = "as native autocast"

_WORDS: Final = {
    Rule.HALF: "half",
    Rule.STATES: "half",
    Rule.FLOAT: "float32",
    Rule.PROMOTE: "widest argument",
    Rule.UNCAST: "as given",
    Rule.LEFT: "left side",
    Rule.BANNED: "refuses half",
    Rule.INPLACE_BANNED: "refuses half",
}

# Native policies that the presence of a kernel does not tell.
_NATIVE: Final = {
    ("binary_cross_entropy", "cuda"): "refused",
    ("binary_cross_entropy", "cpu"): "float32",
    ("grid_sample", "cuda"): "widest argument",
    ("log1p", "cuda"): "float32",
    **{(layer, "cuda"): "half" for layer in ("rnn_tanh", "rnn_relu", "gru", "lstm")},
    # composed of ops that native casts
    ("softmin", "cuda"): "float32",
    ("cross_entropy", "cuda"): "float32",
    ("normalize", "cuda"): "float32",
    ("cross_entropy", "cpu"): "float32",
}

# torch's own type promotion does this, with or without autocast.
_BY_TORCH: Final = frozenset(
    ("add", "div", "mul", "sub", "eq", "equal", "ge", "gt", "le", "lt", "ne", *lists.SEQUENCE_PROMOTE)
)

_SECTIONS: Final = (
    ("Half", lists.HALF),
    ("Float32", lists.FLOAT),
    ("Widest dtype among the arguments", lists.PROMOTE),
    ("Widest dtype in the sequence", lists.SEQUENCE_PROMOTE),
    ("Refused in half", lists.BANNED),
    ("In place, refused on a half tensor", lists.INPLACE_BANNED),
    ("In place, the arguments take the dtype of the left side", LEFT),
    ("On no list of apex", (*lists.UNCAST, *lists.SHIELDED)),
)

_HEAD: Final = """\
# Op lists

What each op does at O1. `python -m ampcompat.amp.op_table` writes this page from the lists in `ampcompat/amp/lists.py`.

A name stands for the op however it is reached: `softmax` is `torch.softmax`, `Tensor.softmax`,
`torch.nn.functional.softmax` and what `nn.Softmax` calls. "half" is float16 unless bfloat16 was asked for. "as given"
means that no argument is cast. Casts apply to float16, bfloat16 and float32 tensors on the device whose casts are on;
float64 and integers are left alone (apex cast float64 too). In-place forms that are not listed keep the dtype of their
left side. Ops on no list follow native autocast: `einsum` and `scaled_dot_product_attention` run in half.

The last column also says who does it: torch's native autocast or type promotion on both devices, or a rule of ampcompat
on those named; "wrapper" is a Python wrapper on the public function, which an earlier `from ... import` escapes.
Under `torch.func.vmap` a batch of `dot` is a matrix product, in half.
A 0-dim tensor widens nothing in `add`, `div`, `mul`, `sub` and the comparisons, as in torch; apex counted it.
"""


def native_rule(name: str, device_type: str) -> str:
    """What native autocast does with the op of the public ``name``, for a ``name`` on a list and "cuda" or "cpu"."""
    if (name, device_type) in _NATIVE:
        return _NATIVE[name, device_type]
    if name in _BY_TORCH:
        return _WORDS[Rule.PROMOTE]
    rule, key = RULES[name], _torch.autocast_key(device_type)
    for op in [op for aten in ATEN.get(name, (name,))[:1] for op in _torch.aten_overloads(aten)]:
        if rule is not Rule.INPLACE_BANNED and key is not None and _torch.has_kernel(op, key):
            return _WORDS[rule]
    return "as given"


def rule_for(name: str, device_type: str) -> str:
    """The rule in force at O1 for the public op ``name`` on ``device_type``.

    Args:
        name: As in "softmax", "torch.nn.functional.softmax" or "Tensor.pow_".
        device_type: As in ``torch.device(...).type``; one without autocast has no casts.

    Returns:
        "half", "float32", "widest argument", "left side", "refuses half", "as given", or "as native autocast".
    """
    if _torch.autocast_key(device_type) is None:
        return _WORDS[Rule.UNCAST]
    rule = RULES.get(name.rpartition(".")[2])
    return UNLISTED if rule is None else _WORDS[rule]


def enforced_by(name: str) -> str:
    """Who sees to the rule for the listed ``name``: "native", "rule on CPU", "rule on CPU, CUDA", "wrapper", ..."""
    if name in {wrapped for _, wrapped in wrappers.WRAPPED} and name != "interpolate":
        return "wrapper"
    differs = [d for d in ("cpu", "cuda") if native_rule(name, d) != _WORDS[RULES[name]]]
    if not differs:
        return "native"
    if not ATEN.get(name, (name,)):
        return "through the ops inside"
    return "rule on " + ", ".join(d.upper() for d in differs)


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for title, names in _SECTIONS:
        parts.append(f"\n## {title}\n\n| op | apex | native CUDA | native CPU | ampcompat |\n|---|---|---|---|---|\n")
        for name in names:
            rule = _WORDS[RULES[name]]
            apex = "not listed" if RULES[name] is Rule.LEFT else rule
            native = " | ".join(native_rule(name, d) for d in ("cuda", "cpu"))
            parts.append(f"| `{name}` | {apex} | {native} | {rule} ({enforced_by(name)}) |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
