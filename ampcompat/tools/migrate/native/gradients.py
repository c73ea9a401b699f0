"""What reads, edits or clears gradients: calls by the name of the function that they run, and ``.grad``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import File, Function, Variable
from ampcompat.tools.migrate.native.nodes import argument, children, descendants, last_name
from ampcompat.tools.migrate.text import code_of

#: Calls that read or edit gradients, by name.
READS = re.compile(r"grad", re.IGNORECASE)
READS_NOT = re.compile(
    r"zero_?grad|no_grad|enable_grad|set_grad|requires_grad|is_grad|retain_grad|autograd|checkpoint|Scaler|"
    r"accumulat|^grad$|GradCAM|Reversal|penalty|zero_out",
    re.IGNORECASE,
)
#: Functions whose result grows with the gradients: ``get_grad_norm``.
NORM = re.compile(r"^_*(get|compute|calc|calculate|total|global)?_*grad(ient)?s?_*norm$", re.IGNORECASE)
CLEARS = re.compile(r"zero_?grad|clear_?grad|zero_out_grad", re.IGNORECASE)
#: torch's functions that clip, which may be imported under other names.
PLAIN_CLIPS = tuple(
    f"torch.nn.utils.{home}{name}" for home in ("", "clip_grad.") for name in ("clip_grad_norm_", "clip_grad_value_")
)


class Gradients:
    """Recognises what touches gradients in a file."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.file = facts.file
        #: What variables are assigned, the last in the text.
        self.assigned = {
            self.file.variable(target.target): node.value
            for node in self.file.of_type(cst.Assign)
            for target in node.targets
        }
        self.tensors = self._assigned_tensors()
        self._meant: dict[Variable, list[str | cst.Lambda]] = {}
        self._ordered: dict[cst.CSTNode, list[cst.CSTNode]] = {}

    def events(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Calls and ``.grad`` of an expression in the order of their evaluation; functions are not entered."""
        if node not in self._ordered:
            self._ordered[node] = list(_in_order(node))
        return self._ordered[node]

    def is_event(self, node: cst.CSTNode) -> bool:
        """Whether a node may touch gradients."""
        if isinstance(node, cst.Attribute):
            return node.attr.value in ("grad", "step", "backward", "zero_grad", "initialize", "scale_loss")
        if isinstance(node, cst.Call):
            symbol = self.facts.symbol(node.func) or ""
            meant = self.functions_meant(node.func)
            reads = any(isinstance(one, cst.Lambda) or READS.search(one) for one in meant)
            return reads or symbol.startswith("apex.amp.")
        return False

    def is_of_parameter(self, grad: cst.Attribute) -> bool:
        """Whether a gradient may be one of a parameter: not of a variable that is assigned some other tensor."""
        if not isinstance(grad.value, cst.Name):
            return True
        return self.file.variable(grad.value) not in self.tensors

    def _assigned_tensors(self) -> set[Variable | None]:
        """Variables that an assignment makes from something else than parameters."""
        found: set[Variable | None] = set()
        for node in self.file.of_type(cst.Assign):
            text = code_of(node.value)
            made = isinstance(node.value, cst.Call | cst.BinaryOperation)
            if made and "param" not in text.lower() and not any(name in text for name in ("weight", "bias", "next(")):
                found |= {self.file.variable(target.target) for target in node.targets}
        return found

    def clears(self, grad: cst.Attribute) -> bool:
        """Whether a statement sets a gradient to None or zero: ``p.grad = None``, ``p.grad.zero_()``."""
        node: cst.CSTNode = grad
        parent = self.file.parents[node]
        while isinstance(parent, cst.Attribute):
            if parent.attr.value == "zero_":
                return True
            node, parent = parent, self.file.parents[parent]
        if isinstance(parent, cst.AssignTarget):
            assign = self.file.parents[parent]
            return isinstance(assign, cst.Assign) and code_of(assign.value) == "None"
        return False

    def functions_meant(self, func: cst.BaseExpression) -> list[str | cst.Lambda]:
        """The names of what a call may run, and lambdas: through imports, ``partial``, variables and parameters."""
        imported = self.file.qualified_name(func).rpartition(".")[2]
        if imported:
            return [imported]
        found: list[str | cst.Lambda] = [last_name(func)]
        variable = self.file.variable(func)
        # A method of some object is meant by its name alone.
        on_self = isinstance(func, cst.Attribute) and isinstance(func.value, cst.Name) and func.value.value == "self"
        if variable is None or not (isinstance(func, cst.Name) or on_self):
            return found
        if variable not in self._meant:
            self._meant[variable] = [
                meant
                for source in self.facts.ordered(self.facts.flows.sources([variable]))
                for meant in self._functions_in(source)
            ]
        return found + self._meant[variable]

    def _functions_in(self, variable: Variable) -> list[str | cst.Lambda]:
        """What a variable is called or assigned: a function's name, a lambda, the function of a ``partial``."""
        value = self.assigned.get(variable)
        if isinstance(value, cst.Lambda):
            return [value]
        if isinstance(value, cst.Call) and last_name(value.func) == "partial" and value.args:
            return [last_name(value.args[0].value)]
        return [variable[1]]


def is_norm(call: cst.Call, function: Function | None) -> bool:
    """Whether a call only computes a norm of gradients: by its name, and what the function does if it is known."""
    if not NORM.search(last_name(call.func)) or last_name(call.func).endswith("_"):
        return False
    if function is None:
        return True
    return not any(_changes_gradients(node) for node in descendants(function))


def _changes_gradients(node: cst.CSTNode) -> bool:
    """Whether a node assigns to something of ``.grad``, or calls a method in place."""
    if isinstance(node, cst.AssignTarget | cst.AugAssign):
        return any(isinstance(n, cst.Attribute) and n.attr.value == "grad" for n in descendants(node.target))
    return isinstance(node, cst.Call) and last_name(node.func).endswith("_") and not last_name(node.func).endswith("__")


def is_plain_clip(call: cst.Call, file: File) -> bool:
    """Whether a call is torch's clipping of gradients, with a threshold."""
    known = file.qualified_name(call.func) in PLAIN_CLIPS and not any(arg.star for arg in call.args)
    return known and clip_threshold(call) is not None


def clip_threshold(call: cst.Call) -> cst.BaseExpression | None:
    """The argument of torch's clipping that says how large gradients may be."""
    return argument(call, 1, "max_norm" if last_name(call.func) == "clip_grad_norm_" else "clip_value")


def is_autograd(base: cst.BaseExpression) -> bool:
    """Whether ``base.backward`` is torch's function, which is given the loss."""
    return code_of(base) in ("torch.autograd", "autograd")


def _is_none_test(node: cst.Comparison) -> bool:
    return code_of(node.comparisons[0].comparator) == "None"


def _in_order(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.Lambda | cst.FunctionDef | cst.ClassDef):
        return
    if isinstance(node, cst.Comparison) and isinstance(node.left, cst.Attribute) and _is_none_test(node):
        return
    if isinstance(node, cst.Assign):
        yield from _in_order(node.value)
        for target in node.targets:
            yield from _in_order(target.target)
        return
    inner = children(node)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        inner = [node.func.value, *node.args]  # torch.autograd.grad is no gradient
    for child in inner:
        yield from _in_order(child)
    if isinstance(node, cst.Call) or (isinstance(node, cst.Attribute) and node.attr.value == "grad"):
        yield node
