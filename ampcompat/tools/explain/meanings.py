"""What ops are not finite at: one flat table from an op to a sentence, which docs/debugging.md has too.

A sentence is of the op alone, whatever it was given: it is true of every run. What to do about it is on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PAGE = "docs/debugging.md"


class Row(NamedTuple):
    """A row of the page.

    Attributes:
        name: Its first column.
        means: Its second column.
        ops: The ops, and the functions that a script calls, that it is for.
    """

    name: str
    means: str
    ops: tuple[str, ...] = ()


def see(rows: Sequence[Row]) -> str:
    """Where to find ``rows``, as in 'docs/debugging.md, "log"'."""
    return f"{PAGE}, " + ", ".join(f'"{row.name}"' for row in rows)


OPS = (
    Row(
        "log",
        "the logarithm of 0 is -inf, with an infinite derivative, and of less than 0 NaN",
        ("log", "log2", "log10", "log1p", "logit", "xlogy", "kl_div"),
    ),
    Row(
        "sqrt, norm",
        "a root has an infinite derivative at 0, where its inverse is inf, and is NaN of less than 0",
        ("sqrt", "rsqrt", "norm", "linalg_vector_norm", "linalg_norm", "vector_norm", "cdist"),
    ),
    Row(
        "pow",
        "at 0, x ** p is inf if p < 0, its derivative if 0 < p < 1; of x < 0 it is NaN unless p is whole",
        ("pow", "float_power"),
    ),
    Row("div", "x / 0 is inf, and 0 / 0 is NaN", ("div", "truediv", "true_divide", "divide", "reciprocal")),
    Row("mean", "the mean of no values is NaN", ("mean",)),
    Row(
        "std",
        "the deviation and the variance of a single value are NaN, unless correction=0",
        ("std", "var", "std_mean", "var_mean"),
    ),
    Row("exp", "exp(x) is inf beyond 88.7, and beyond 11.1 in float16", ("exp", "expm1", "sinh", "cosh")),
    Row(
        "acos",
        "it has an infinite derivative at the ends of its domain, and is NaN outside",
        ("acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh"),
    ),
    Row(
        "cross_entropy",
        "the mean over labels that are all ignore_index, or of weight 0, is 0 / 0",
        ("cross_entropy", "nll_loss", "nll_loss_forward", "nll_loss2d_forward"),
    ),
    Row(
        "ctc_loss",
        "the loss of a target that is longer than its input is inf",
        ("ctc_loss", "_ctc_loss", "_cudnn_ctc_loss"),
    ),
)
BY_OP = {op: row for row in OPS for op in row.ops}

#: Of an op that is not in the table.
UNDEFINED = Row("in float32 too", "float32 gives the same of these inputs")
NOT_COMPUTED = Row("not computed", "the op was not computed in float32")
TOO_LARGE = Row("too large", "float32 gives finite values of these inputs, half does not")
GRADIENT = Row("gradient", "float32 holds this gradient, half does not, with the loss scale in it")
CONSTANT = Row("constant", "half holds no such number")
WRITTEN = Row("written", "a number among its arguments is inf or NaN")
GROWTH = Row("growth", "numbers of the last steps")

#: Of what no op has made that was seen, by the kind.
OUTSIDE = {
    "input": Row("input", "no op of this forward made it"),
    "parameter": Row("parameter", "no op of this forward made it"),
    "buffer": Row("buffer", "no op of this forward made it"),
    "tensor": Row("tensor", "no op that was seen made it"),
}

#: Of what is no value's birth.
STEP = Row("step", "what was looked at before this step was finite")
OLD_GRADIENTS = Row("old gradients", "gradients are kept until they are cleared")
UNKNOWN = Row("unknown", "no op that was seen made it")
SKIPPED = Row("skipped", "a dynamic loss scale comes down by skipping steps")
ZEROS = Row("gradients of 0", "a step with gradients of 0 moves no weight by them")
NO_STEP = Row("no step", "a block ended, and optimizer.step() was not called after it")
