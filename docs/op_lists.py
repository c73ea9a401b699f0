"""Writes docs/op_lists.md from the lists in ampcompat/amp/lists: ``python docs/op_lists.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ampcompat import _torch
from ampcompat.amp.casts.rules import PYTHON, Rule, rules_by_name
from ampcompat.amp.lists import NO_BFLOAT16, UNCAST, torch_overrides

PAGE: Final = Path(__file__).with_suffix(".md")
RULES: Final = rules_by_name()

UNLISTED: Final = "as native autocast"

_WORDS: Final = {
    Rule.HALF: "half",
    Rule.FLOAT: "float32",
    Rule.PROMOTE: "widest argument",
    Rule.UNCAST: "as given",
    Rule.NO_BFLOAT16: "as given; float32 for bfloat16",
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
    ("pinv", "cuda"): "half inside",
    ("pinv", "cpu"): "half inside",
    ("affine_grid", "cuda"): "half inside",
    ("affine_grid", "cpu"): "half inside",
    ("norm_except_dim", "cuda"): "float32",
    ("softmin", "cuda"): "float32",
    ("normalize", "cuda"): "float32",
    # seen in values alone: the dtype of the result is float32
    ("cross_entropy", "cuda"): "float32, of half logarithms",
    **{(name, "cuda"): "float32, gradients in half" for name in ("cumprod", "cumsum", "norm")},
}

#: On apex's list by kind alone: losses that torch got after it.
SINCE_APEX: Final = frozenset(("gaussian_nll_loss", "huber_loss", "triplet_margin_with_distance_loss"))

# torch's own type promotion does this, with or without autocast.
_BY_TORCH: Final = frozenset(
    ("add", "div", "mul", "sub", "eq", "equal", "ge", "gt", "le", "lt", "ne", *torch_overrides.SEQUENCE_CASTS)
)


def names(rule: Rule) -> list[str]:
    """The names with ``rule``, in alphabetical order."""
    return sorted(name for name, found in RULES.items() if found is rule)


_SEQUENCES: Final = torch_overrides.SEQUENCE_CASTS
_SECTIONS: Final = (
    ("Half", names(Rule.HALF)),
    ("Float32", names(Rule.FLOAT)),
    ("Widest dtype among the arguments", [name for name in names(Rule.PROMOTE) if name not in _SEQUENCES]),
    ("Widest dtype in the sequence", _SEQUENCES),
    ("Refused in half", names(Rule.BANNED)),
    ("In place, refused on a half tensor", names(Rule.INPLACE_BANNED)),
    ("In place, the arguments take the dtype of the left side", names(Rule.LEFT)),
    ("On no list of apex", [*UNCAST, *NO_BFLOAT16]),
)

_HEAD: Final = """\
<!-- Generated from ampcompat/amp/lists by op_lists.py. -->
# Op lists

How O1 and O4 cast each operation. Search the page for its name: `softmax` stands for `torch.softmax`,
`Tensor.softmax`, `torch.nn.functional.softmax` and what `nn.Softmax` calls.

| term | meaning |
|---|---|
| half | float16, or bfloat16 if you ask for it |
| as given | no argument is cast |
| native | torch's own autocast or type promotion does it, on the CPU and on CUDA |
| rule on CPU, CUDA | ampcompat does it on these devices |
| whole function | ampcompat casts the arguments of a function that torch wrote in Python over other operations |
| by name | ampcompat refuses what a script calls (`x.exp_()`, `x **= 2`), not what torch calls itself for `square_` |

Operations on no list follow native autocast: `einsum` and `scaled_dot_product_attention` run in half. Other in-place
forms keep the dtype of their left side. float64 and integers are not cast. A 0-dim tensor does not widen the result of
`add`, `div`, `mul`, `sub` and the comparisons. Under `torch.func.vmap`, a batch of `dot` is a matrix product, in half.

## Edit the lists

Edit them before `amp.initialize`, by apex's names:

```python
amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
```

The modules `functional_overrides`, `torch_overrides` and `tensor_overrides` of `amp.lists` hold `FP16_FUNCS`,
`FP32_FUNCS`, `CASTS`, `SEQUENCE_CASTS` and `BANNED_FUNCS`.

- `FP16_FUNCS` is cast to the half dtype in force, at O1 and O4.
- A name that you add leaves the list that it was on. On several, half beats float32, and float32 the widest dtype.
- A name that you remove and add nowhere runs as given. A name that is not a function of torch gives a warning.
"""


def native_rule(name: str, device_type: str) -> str:
    """What native autocast does with the op of the public ``name``, for a ``name`` on a list and "cuda" or "cpu"."""
    if (name, device_type) in _NATIVE:
        return _NATIVE[name, device_type]
    if name in _BY_TORCH:
        return _WORDS[Rule.PROMOTE]
    rule, key = RULES[name], _torch.autocast_key(device_type)
    for op in [op for aten in _torch.ATEN.get(name, (f"{name}.*",))[:1] for op in _torch.aten_overloads(aten)]:
        if rule is not Rule.INPLACE_BANNED and key is not None and _torch.op_name(op) in _torch.ops_with_kernel(key):
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
    """What does it for the listed ``name``: "native", "rule on CPU", "whole function", ..."""
    if RULES[name] in (Rule.BANNED, Rule.INPLACE_BANNED):
        return "by name"
    if name in PYTHON and _torch.ATEN.get(name) == ():
        return "whole function"
    differs = [d for d in ("cpu", "cuda") if native_rule(name, d) != _WORDS[RULES[name]]]
    if not differs:
        return "native"
    if not _torch.ATEN.get(name, (name,)):
        return "through the ops inside"
    return "rule on " + ", ".join(d.upper() for d in differs)


def _row(name: str) -> str:
    """What the page says of the listed ``name``, as cells of a row."""
    rule = _WORDS[RULES[name]]
    apex = rule
    if RULES[name] is Rule.LEFT or name in SINCE_APEX:
        apex = "not listed"
    elif RULES[name] is Rule.NO_BFLOAT16:
        apex = "as given"  # it had no bfloat16
    native = " | ".join(native_rule(name, device_type) for device_type in ("cuda", "cpu"))
    return f"{rule} ({enforced_by(name)}) | {apex} | {native}"


def page() -> str:
    """The page as Markdown. Operations of which it says the same are on one row."""
    parts = [_HEAD]
    for title, names in _SECTIONS:
        parts.append(f"\n## {title}\n\n| ops | ampcompat | apex | native CUDA | native CPU |\n|---|---|---|---|---|\n")
        names_by_row: dict[str, list[str]] = {}
        for name in names:
            names_by_row.setdefault(_row(name), []).append(f"`{name}`")
        for row, alike in names_by_row.items():
            parts.append(f"| {', '.join(alike)} | {row} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
