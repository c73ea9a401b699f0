"""The birth of a value that is not finite, as facts: plain data, and the lines that are told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain import meanings
from ampcompat.tools.explain.call import CAST_OPS
from ampcompat.tools.explain.meanings import Row
from ampcompat.tools.explain.places import Place
from ampcompat.tools.explain.tensor_facts import TensorFacts
from ampcompat.tools.words import counted

#: Kinds of births, beside those of ``meanings.OUTSIDE``: an op made it; another rank, or something else not seen, did.
OP, UNSEEN = "op", "unseen"

#: Ops that make 0 of an inf.
_DIVISIONS = ("div", "reciprocal", "rsqrt", "pow")

Lines = list[tuple[str, str]]


@dataclass(frozen=True)
class Underflow:
    """Zeros that an op gave in half, and that float32 does not give of the same inputs."""

    place: Place
    op: str
    zeros: int
    float32: float  # the largest magnitude that float32 gives in their place


@dataclass(eq=False)
class Made:
    """How a tensor was made."""

    op: str
    place: Place
    has_zeros: bool = False
    is_scaled: bool = False  # it is a gradient that has the loss scale in it
    largest: float = 0.0  # the largest magnitude of such a gradient
    underflow: Underflow | None = None
    hidden: Birth | None = None  # where the inf was born that the op was given, if it gave nothing but finite values
    sources: list[Made] = field(default_factory=list)  # of its inputs, as far as known

    @property
    def is_division(self) -> bool:
        """Whether it was made by a division, which makes 0 of an inf."""
        return self.op.removesuffix("_") in _DIVISIONS

    def grown_beyond(self, limit: float) -> Made | None:
        """The op, this or one before, whose result is larger than ``limit``, and nothing before it is."""
        if not self.largest > limit:
            return None
        before = max(self.sources, key=lambda one: one.largest, default=None)
        return self if before is None else before.grown_beyond(limit) or self


@dataclass(eq=False)
class Birth:
    """The first value that is not finite: an op made it of finite inputs, or it came from outside."""

    kind: str
    name: str  # the op, as in "mm"; or what came, as in "input 0 of Net"
    place: Place  # where it was made, or first used
    is_backward: bool  # the autograd engine ran the op
    out: TensorFacts  # the result, or the tensor that came
    inputs: list[TensorFacts] = field(default_factory=list)  # what the op was given; the master of what came
    numbers: dict[str, float] = field(default_factory=dict)  # among the arguments of the op
    float32: float | None = None  # the largest magnitude that float32 gives of the same inputs, if known
    gradient: Made | None = None  # how the gradient in its inputs was made, if it has the loss scale in it
    read: frozenset[int] = frozenset()  # the storages of the parameters that ops had read before
    zero: Made | None = None  # how a 0 in its inputs was made of something else
    became: tuple[Place, str] | None = None  # where its inf became something else: "NaN" or "0"

    # -- what follows from them ----------------------------------------------------------------------------------------
    @property
    def is_scaled(self) -> bool:
        """Whether it is a gradient that has the loss scale in it."""
        return self.gradient is not None

    @property
    def is_written(self) -> bool:
        """Whether a number among its arguments is inf or NaN, as the value of a mask."""
        return not all(map(math.isfinite, self.numbers.values()))

    @property
    def is_mask(self) -> bool:
        """Whether it is such an inf, and nothing has become NaN by it."""
        return any(map(math.isinf, self.numbers.values())) and self.became is None

    @property
    def is_held_by_float32(self) -> bool:
        """Whether float32 holds what half does not."""
        return self.out.dtype in HALF_DTYPES and self.float32 is not None and math.isfinite(self.float32)

    @property
    def _most(self) -> float:
        """The largest number that the result's dtype holds."""
        return torch.finfo(self.out.dtype).max

    def may_end_at_lower_scale(self, scale: float) -> bool:
        """Whether it is a gradient that half holds without the loss ``scale``."""
        return self.is_scaled and self.is_held_by_float32 and (self.float32 or 0.0) / scale <= self._most

    def grown_at(self, scale: float) -> Place | None:
        """Where the gradient that a cast to half lost was first beyond half without the loss ``scale``; else None."""
        if self.gradient is None or self.name not in CAST_OPS:
            return None
        made = self.gradient.grown_beyond(self._most * scale)
        return None if made is None else made.place

    @property
    def called(self) -> str:
        """What the script called, as in "softmax"; the op where it called none."""
        return self.place.function or ("a cast" if self.name in CAST_OPS else self.name)

    @property
    def key(self) -> str:
        """Two births with equal keys are one fault."""
        if self.is_scaled and self.is_held_by_float32:
            return "gradient"  # as the scale falls, they are born in one op after the other
        is_line_of_model = self.place.line is not None and not self.place.is_of_torch  # or that which has called it
        where = self.place.line if is_line_of_model else self.place.module
        return f"{self.kind} {self.name} {where} {self.is_backward}"

    @property
    def words(self) -> str:
        """It in a few words, as in "log at train.py:17"."""
        what = self.name
        if self.kind == OP:
            what = f"the backward of {self.called}" if self.is_backward else self.called
        line = self.place.line
        return what if line is None else f"{what} at {line.file}:{line.number}"

    def row(self) -> Row:
        """The row of the page that it is in."""
        if self.kind != OP:
            return meanings.OUTSIDE[self.kind]
        if self.is_written:
            return meanings.WRITTEN
        if self._numbers_beyond_half():
            return meanings.CONSTANT
        if self.is_held_by_float32:
            return meanings.GRADIENT if self.is_scaled else meanings.TOO_LARGE
        undefined = meanings.UNDEFINED
        if self.float32 is None and self.out.dtype in HALF_DTYPES:
            undefined = meanings.NOT_COMPUTED
        names = (self.place.function.strip("_"), self.name.strip("_"), self.name)
        return next((meanings.BY_OP[name] for name in names if name in meanings.BY_OP), undefined)

    def _numbers_beyond_half(self) -> list[str]:
        """The names of the numbers that the result's dtype does not hold."""
        is_half = self.out.dtype in HALF_DTYPES
        return [name for name, number in self.numbers.items() if is_half and self._most < abs(number) < math.inf]

    # -- in words ------------------------------------------------------------------------------------------------------
    def lines(self, scale: float, is_dynamic: bool) -> Lines:
        """What is told of it, as labels and texts; ``scale`` is the loss scale of its block."""
        lines = [] if self.place.line is None else [("line", str(self.place.line))]
        if self.kind == OP:
            lines += [("op", self._op()), ("module", self._module())]
            lines += [("in", str(one)) for one in self.inputs]
            lines += self._number_lines()
            lines += [("out", str(self.out)), *self._float32_lines()]
        else:
            lines += [("what", f"{self.name} was not finite before"), ("in", str(self.out))]
            lines += [("in", str(one)) for one in self.inputs]
        if self.is_scaled:
            lines.append(("scale", self._scale(scale, is_dynamic)))
        grown = self.grown_at(scale)
        if grown is not None:
            lines.append(("from", f"beyond half without the loss scale in the backward of {_at(grown)}"))
        if self.zero is not None:
            lines.append(("zeros", _zeros(self.zero)))
        if self.became is not None:
            place, what = self.became
            lines.append(("then", f"became {what} in {_at(place)}"))
        return lines

    def _op(self) -> str:
        op = self.called if self.called.strip("_") == self.name.strip("_") else f"{self.called} (aten::{self.name})"
        return f"{op}, in the {'backward' if self.is_backward else 'forward'}"

    def _module(self) -> str:
        place = self.place
        if place.module is None:
            return "outside of any module"
        if not place.model or not place.module:
            return f"{place.kind} itself"
        return f"{place.module} ({place.kind}), in {place.model}"

    def _number_lines(self) -> Lines:
        if not self.numbers:
            return []
        beyond = self._numbers_beyond_half()
        ends = f" ({self._end})" if beyond else ""
        return [("numbers", ", ".join(f"{name}={number:g}" for name, number in self.numbers.items()) + ends)]

    def _float32_lines(self) -> Lines:
        if self.float32 is None:
            return []
        if self.is_held_by_float32:
            return [("float32", f"gives up to {self.float32:.6g} of these inputs; {self._end}")]
        return [("float32", "is not finite of these inputs either")]

    @property
    def _end(self) -> str:
        return f"{dtype_name(self.out.dtype)} ends at {self._most:g}"

    def _scale(self, scale: float, is_dynamic: bool) -> str:
        text = f"the loss scale is {scale:g}, {'dynamic' if is_dynamic else 'static'}"
        if not self.is_held_by_float32:
            return text
        return f"{text}; divided by it, {(self.float32 or 0.0) / scale:.3g}"

    def as_dict(self, scale: float) -> dict[str, object]:
        """Its facts for a line of JSON; ``scale`` is the loss scale."""
        line = self.place.line
        grown = self.grown_at(scale)
        return {
            "kind": self.kind,
            "op": self.name,
            "function": self.place.function,
            "pass": "backward" if self.is_backward else "forward",
            "module": self.place.module,
            "model": self.place.model,
            "file": None if line is None else line.file,
            "line": None if line is None else line.number,
            "source": None if line is None else line.source,
            "inputs": [one.as_dict() for one in self.inputs],
            "numbers": self.numbers,
            "out": self.out.as_dict(),
            "float32": self.float32,
            "scale": scale,
            "from": None if grown is None else str(grown.line),
            "zeros": None if self.zero is None else _zeros(self.zero),
            "became": None if self.became is None else self.became[1],
        }


def _zeros(made: Made) -> str:
    called = made.place.function or made.op
    if made.underflow is not None:
        lost = made.underflow
        text = f"{called} gave {counted(lost.zeros, 'zero')} where float32 gives up to {lost.float32:.3g}"
    else:
        hidden = "" if made.hidden is None else f", of {made.hidden.words},"
        text = f"{called} was given what is not finite{hidden} and gave 0"
    return text if made.place.line is None else f"{text}, at {made.place.line}"


def _at(place: Place) -> str:
    """As in "softmax at train.py:17: p = x.softmax(-1)"."""
    called = place.function or "an op"
    return called if place.line is None else f"{called} at {place.line}"
