"""What is left to the reader: mentions of apex, and what reads or hands on the objects that are under amp."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.symbols import MODULES, verdict
from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import File
from ampcompat.tools.migrate.native.nodes import argument, elements, last_name
from ampcompat.tools.migrate.native.paths import Walk
from ampcompat.tools.migrate.text import code_of

ADVICE = {
    "apex.amp.initialize": "call amp.initialize(model, optimizer, ...) by that name, and migrate again",
    "apex.parallel.DistributedDataParallel": "these arguments have no counterpart in torch's DistributedDataParallel",
    "apex.parallel.LARC": "torch has no LARC; keep this one of ampcompat, or take another optimizer",
    "apex.parallel.LARC.LARC": "torch has no LARC; keep this one of ampcompat, or take another optimizer",
    "apex.normalization.FusedRMSNorm": "use torch.nn.RMSNorm",
    "apex.optimizers.FusedAdam": "use torch.optim.AdamW(fused=True), or Adam for adam_w_mode=False",
    "apex.optimizers.FusedSGD": "use torch.optim.SGD(fused=True)",
    "apex.optimizers.FusedLAMB": "torch has no LAMB; keep this one of ampcompat, or take another optimizer",
    "apex.optimizers.FusedNovoGrad": "torch has no NovoGrad; keep this one of ampcompat, or take another optimizer",
    "apex.amp._amp_state.loss_scalers": "use get_scale() of the scaler",
    "apex.amp.state_dict": "a GradScaler's state has other keys; use scaler.get_scale()",
    "apex.amp.init": "write scaler = mixed_precision(model) once the model exists, then scaler.scale(loss).backward()",
    "apex.amp.float_function": "use torch.autocast(device_type, enabled=False) inside the function, on x.float()",
    "apex.amp.register_float_function": "call it under torch.autocast(device_type, enabled=False), on x.float()",
    "apex.amp.half_function": "autocast decides by operation; cast the arguments with x.half() by hand",
    "apex.amp.register_half_function": "autocast decides by operation; cast the arguments with x.half() by hand",
    "apex.amp.promote_function": "autocast decides by operation; cast the arguments to one dtype by hand",
    "apex.amp.register_promote_function": "autocast decides by operation; cast the arguments to one dtype by hand",
}
HALF = re.compile(r"^torch\.(float16|half|bfloat16|HalfTensor|cuda\.HalfTensor)$")
PROBES = ("find_spec", "import_module", "__import__", "version", "find_loader", "get_distribution")
PROBED = re.compile(r"[\"']apex\b")
STASHES = ("_amp_stash", "_amp_state")


def apex_mentions(file: File) -> Iterator[tuple[cst.CSTNode, str]]:
    """Names of apex that a file reads outside of imports, the longest chain of each."""
    imported = file.imported_names()
    for node in file.names():
        parent = file.parents.get(node)
        if isinstance(parent, cst.ImportAlias | cst.AsName | cst.ImportFrom | cst.Import | cst.AssignTarget):
            continue
        if isinstance(parent, cst.Attribute | cst.ClassDef | cst.FunctionDef):
            continue
        if isinstance(parent, cst.Arg | cst.Param) and node in (
            getattr(parent, "keyword", None),
            getattr(parent, "name", None),
        ):
            continue
        if _root(node) not in imported:
            continue
        symbol = file.symbol(_known_part(node, file))
        if symbol is not None and symbol.split(".")[0] in ("apex", *EXTENSIONS):
            yield node, symbol


def _root(node: cst.CSTNode) -> str:
    """``amp`` for ``amp._amp_state.loss_scalers[0]``."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return last_name(node)


def _known_part(node: cst.CSTNode, file: File) -> cst.CSTNode:
    """The chain of names at the beginning of an expression like ``amp._amp_state.loss_scalers[0].x``."""
    while isinstance(node, cst.Attribute) and file.symbol(node) is None:
        node = node.value
    return node


def mark_mentions(file: File, edits: Edits, reasons: dict[str, str]) -> None:
    """Mark each statement that still names apex."""
    for node, symbol in apex_mentions(file):
        if symbol in MODULES:
            advice = "the module is handed on or tested here: drop it, the scaler of this file is what remains of it"
        else:
            note = verdict(symbol).note if verdict(symbol).verdict == "unsupported" else "no counterpart in torch.amp"
            advice = ADVICE.get(symbol, note)
        edits.mark(file.statement(node), f"{symbol}: {reasons.get(symbol, advice)}")


def mark_objects(facts: Facts, walk: Walk, scaler: str, edits: Edits) -> None:
    """Mark what reads or hands on a model or an optimizer in a manner that a scaler does not see."""
    file = facts.file
    for node in file.of_types(cst.Attribute, cst.Call, cst.Comparison):
        message = None
        if isinstance(node, cst.Attribute):
            message = _unseen_step(node, facts, walk, scaler) or _stash(node) or _own_forward(node, facts)
        elif isinstance(node, cst.Call):
            message = _call(node, facts, scaler)
        elif isinstance(node, cst.Comparison):
            message = _dtype_test(node)
        if message is not None:
            edits.mark(file.statement(node), message)


def _unseen_step(node: cst.Attribute, facts: Facts, walk: Walk, scaler: str) -> str | None:
    """A step of an optimizer that is not called where it is named: in a lambda, as a value."""
    if node.attr.value != "step" or not facts.is_optimizer(node.value):
        return None
    parent = facts.file.parents[node]
    if isinstance(parent, cst.Call) and parent.func is node and parent in walk.steps:
        return None
    optimizer = code_of(node.value)
    return f"gradients are scaled: step by {scaler}.step({optimizer}), then {scaler}.update()"


def _stash(node: cst.Attribute) -> str | None:
    if node.attr.value not in STASHES[:1]:
        return None
    return f"{node.attr.value} is what apex leaves on optimizers: there is none now, and the weights are the masters"


def _grad_of_result(node: cst.Call, facts: Facts) -> str | None:
    """``autograd.grad(..., inputs=h)`` where ``h`` comes out of a model."""
    if last_name(node.func) != "grad":
        return None
    given = argument(node, 1, "inputs")
    if given is None:
        return None
    for one in elements(given) or [given]:
        if facts.file.variable(one) in facts.results:
            return (
                f"{code_of(one)} is a float32 copy of what the model computed, so nothing depends on it: in forward, "
                "call .float() on it before it is used there"
            )
    return None


def _own_forward(node: cst.Attribute, facts: Facts) -> str | None:
    """``model.forward = f`` hides the forward that runs under autocast."""
    if node.attr.value != "forward" or not facts.is_model(node.value):
        return None
    if not isinstance(facts.file.parents[node], cst.AssignTarget):
        return None
    return "this forward is not under autocast: assign it before mixed_precision(), to a class of its own"


def _call(node: cst.Call, facts: Facts, scaler: str) -> str | None:
    name = last_name(node.func)
    if name in PROBES and node.args and PROBED.match(code_of(node.args[0].value)):
        return "apex is not needed any more: what depends on finding it is True now"
    if name in ("getattr", "hasattr") and len(node.args) > 1:
        asked = code_of(node.args[1].value).strip("\"'")
        if asked in STASHES:
            return f"{asked} is what apex leaves behind: there is none now"
        if asked == "step" and facts.is_optimizer(node.args[0].value):
            return f"gradients are scaled: step by {scaler}.step(optimizer), then {scaler}.update()"
        return None
    message = _grad_of_result(node, facts)
    if message is not None:
        return message
    if (
        name == "retain_grad"
        and isinstance(node.func, cst.Attribute)
        and facts.file.variable(node.func.value) in facts.results
    ):
        return "this is a float32 copy of what the model computed: call retain_grad() in forward"
    if name == "script" and "jit" in code_of(node.func) and any(facts.is_model(a.value) for a in node.args):
        return "torch.jit.script cannot compile a model under autocast: script it before mixed_precision(), or trace it"
    if name in ("spawn", "Process") and _hands_on(node, facts):
        return "a pickled model is a plain one: call mixed_precision() in the process that trains"
    return None


def _hands_on(node: cst.Call, facts: Facts) -> bool:
    given = [one for arg in node.args for one in elements(arg.value) or [arg.value]]
    return any(facts.is_model(one) for one in given)


def _dtype_test(node: cst.Comparison) -> str | None:
    """``out.dtype == torch.float16``: what a model returns is float32 now."""
    texts = [code_of(node.left), *(code_of(target.comparator) for target in node.comparisons)]
    names_half = any(HALF.match(text) for text in texts)
    asks_tensor = any(".dtype" in text or "type()" in text for text in texts)
    if not (names_half and asks_tensor):
        return None
    return "weights and results of the model are float32 now: test for torch.float32, or drop this"
