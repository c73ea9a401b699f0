"""``--to native``: imports of ``native_amp`` take the place of ``apex.amp``, classes of torch that of apex's others.

| a name of apex | becomes |
|---|---|
| ``amp``, imported under whatever name | that name, for ``native_amp`` |
| ``apex.amp`` of ``import apex`` | ``native_amp`` |
| a class that torch has too | the same name, for torch's; its calls get torch's arguments |
| a name that nothing reads | nothing |
| others | they stay, under a mark |
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.findings import UNSUPPORTED
from ampcompat.tools.check.libraries import uses_of_apex
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.symbols import MODULES, ON_OPTIMIZERS, canonical, verdict
from ampcompat.tools.migrate.copied import NAME
from ampcompat.tools.migrate.edits import Edits
from ampcompat.tools.migrate.mentions import INSTALLED, is_apex, last_name, listed, looked_for, mentions, probes
from ampcompat.tools.migrate.provided import attributes, has, takes
from ampcompat.tools.migrate.replaced import (
    TO_FLOAT,
    advice,
    counterpart,
    has_counterpart,
    note,
    refused_arguments,
    write_arguments,
)
from ampcompat.tools.migrate.result import Result

#: Modules of apex.amp whose names ``native_amp`` has itself.
FLATTENED = ("apex.amp.amp", "apex.amp.frontend", "apex.amp.handle", "apex.amp.scaler", "apex.amp._amp_state")

#: What may ask whether apex is there.
_TESTS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp, ast.While, ast.Assert)
#: What to write for names of apex.amp that ``native_amp`` does not have.
INSTEAD = {
    "init": f"{NAME} has no handle; call amp.initialize(model, optimizer, opt_level=...) once, and amp.scale_loss for"
    " its scale_loss; where nothing is trained, without an optimizer",
    "promote_function": f"{NAME} does not have it; cast the arguments to the widest of their dtypes",
    "register_promote_function": f"{NAME} does not have it; cast the arguments to the widest of their dtypes",
    "_amp_stash": f"{NAME} does not have it; weights are float32, and their own masters",
    "_amp_lazy_init": f"{NAME} makes no masters; drop it",
    "_lazy_init_maybe_master_weights": f"{NAME} makes no masters; drop it",
    "_master_params_to_model_params": f"{NAME} makes no masters; drop it",
    "_prepare_amp_backward": f"{NAME} does not call it; do that before the scale_loss block",
    "_post_amp_backward": f"{NAME} does not call it; do that after the scale_loss block",
}
#: What to do in the place of a class that calls apex, and of an argument by which a library is told to.
IN_PLACE_OF_CLASS = (
    "the library calls apex itself; in its place, write with amp.scale_loss(loss, optimizer) as scaled_loss: "
    "scaled_loss.backward()"
)
IN_PLACE_OF_ARGUMENT = "the library calls apex itself; have it use torch's autocast, which it may call native"


def rewrite_native(source: Source, package: str = "") -> Result:
    """The source without apex, as far as ``native_amp`` and torch have what it uses.

    Args:
        source: The parsed source.
        package: The package that ``native_amp`` is in; ``""`` if it stands beside the script.
    """
    return _Rewriting(source, package).result()


class Use(NamedTuple):
    """A use of a class of apex: the call, and torch's name for it, if there are such."""

    node: ast.Name | ast.Attribute
    call: ast.Call | None
    name: str | None


class _Rewriting:
    """The rewriting of one source.

    Attributes:
        left: Names of apex that are still used, by the symbol that their import names.
    """

    def __init__(self, source: Source, package: str) -> None:
        self.source = source
        self.edits = Edits(source)
        self.package = package
        self.needs_amp = False
        self.needs_torch = False
        self.reads = _names_read(source)
        self.left: set[str] = set()
        self.classes: dict[str, str] = {}
        self.uses: dict[str, list[Use]] = {}

    def result(self) -> Result:
        """The rewritten source."""
        for node, symbol in list(mentions(self.source)):
            self._mention(node, symbol)
        for symbol, uses in self.uses.items():
            self._imported_class(symbol, uses)
        for call in self.source.calls:
            self._keywords(call)
        self._what_amp_leaves()
        self._bare_names()
        for text in probes(self.source):
            self._probe(text)
        for text in looked_for(self.source, ("sys.modules", "globals()", "locals()")):
            self.edits.mark(text, f"{text.value!s} is looked for by its name; look for {NAME}, or leave the test out")
        for text in probes(self.source, INSTALLED):
            self.edits.mark(text, "apex is looked for among what is installed, and nothing needs it any more")
        for plain in self.source.kind(ast.Import):
            self._import(plain)
        for statement in self.source.kind(ast.ImportFrom):
            self._import_from(statement)
        self._libraries()
        if self.needs_torch and not _binds_torch(self.source):
            _import_torch(self.edits)
        result = self.edits.apply()
        result.needs_amp = self.needs_amp
        return result

    # -- uses ----------------------------------------------------------------------------------------------------------
    def _mention(self, node: ast.Name | ast.Attribute, symbol: str) -> None:
        """Rewrite one use of apex, or mark it."""
        chain = _chain(node)
        root = self.source.bindings.names.get(chain[0].id, "") if isinstance(chain[0], ast.Name) else ""
        if symbol == "apex":  # the package itself: see _bare_names
            return
        if symbol == "apex.amp" or symbol.startswith("apex.amp."):
            self._amp_mention(node, symbol, chain, root)
            return
        call = self.source.parents.get(node)
        call = call if isinstance(call, ast.Call) and call.func is node else None
        name = counterpart(symbol, call, self.edits)
        if isinstance(node, ast.Name) and has_counterpart(symbol):
            self.uses.setdefault(symbol, []).append(Use(node, call, name))
        elif name is not None:
            self.needs_torch = True
            self.edits.replace(node, name)
            if call is not None:
                self._arguments(symbol, call)
        elif symbol in TO_FLOAT and call is not None and len(call.args) == 1:
            simple = isinstance(call.args[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            self.edits.between(call, call.args[0], "" if simple else "(", ".item()" if simple else ").item()")
        else:
            self.left.add(root)
            self._mark_class(Use(node, call, name), symbol)

    def _amp_mention(self, node: ast.expr, symbol: str, chain: list[ast.expr], root: str) -> None:
        """``amp.initialize`` stays; ``apex.amp.initialize`` loses ``apex``."""
        rest = symbol.removeprefix("apex.amp").lstrip(".")
        name = rest.partition(".")[0]
        if root == "apex" and len(chain) > 1:
            self.needs_amp = True
            self.edits.replace(chain[1], NAME)
        if name and not has(name):
            self.left.add(root)
            self._mark_use(node, symbol)
        elif name == "_amp_state":
            self._attributes_of_state(node, symbol, root)

    def _attributes_of_state(self, node: ast.expr, symbol: str, root: str) -> None:
        """Mark ``_amp_state.handle`` and ``_amp_state.opt_properties.patch_torch_functions``."""
        imported = root if root.endswith("._amp_state") else "apex.amp._amp_state"
        names = symbol.removeprefix(imported).split(".")[1:]
        for owner, name in zip(("_amp_state", "opt_properties"), names, strict=False):
            if name not in attributes(owner) and not name.startswith("__"):
                self._mark_use(node, f"apex.amp._amp_state.{name}")
            if name != "opt_properties":
                return

    def _what_amp_leaves(self) -> None:
        """Mark attributes and methods of optimizers and loss scalers that ``native_amp`` does not give them."""
        scalers = _names_of_loss_scalers(self.source)
        for node in self.source.kind(ast.Attribute):
            parent = self.source.parents.get(node)
            name = parent.attr if isinstance(parent, ast.Attribute) else ""
            if node.attr == "_amp_stash":
                if name and name not in attributes("_amp_stash"):
                    self.edits.mark(node, f"_amp_stash.{name}: {INSTEAD['_amp_stash']}")
            elif node.attr in ON_OPTIMIZERS:
                self.edits.mark(node, f"{node.attr}: {INSTEAD[node.attr]}")
            elif node.attr in attributes("LossScaler"):
                continue
            elif _is_loss_scaler(node.value) or (self.source.scope(node), dotted(node.value)) in scalers:
                self.edits.mark(node, f"LossScaler.{node.attr}: {NAME} does not have it")
        for method in self.source.kind(ast.FunctionDef):
            if method.name in ON_OPTIMIZERS:
                self.edits.mark(method, f"{method.name}: {INSTEAD[method.name]}")
        for call in self.source.calls_named("getattr", "setattr"):
            named = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else ""
            if named in ON_OPTIMIZERS and named != "_amp_stash":
                self.edits.mark(call, f"{named}: {INSTEAD[str(named)]}")

    def _keywords(self, call: ast.Call) -> None:
        """Mark the keywords that a function of ``native_amp`` does not take."""
        symbol = self.source.apex(call.func)
        if symbol is None or not symbol.startswith("apex.amp."):
            return
        function = symbol.rpartition(".")[2]
        for keyword in call.keywords:
            if keyword.arg is not None and not takes(function, keyword.arg):
                self.edits.mark(call, f"{function}({keyword.arg}=): {NAME} does not have it; drop it")

    def _imported_class(self, symbol: str, uses: list[Use]) -> None:
        """Have the import of a class say which one of torch it is, if that is one for all of its uses."""
        names = {use.name for use in uses}
        if len(names) > 1 or None in names:
            self.left.add(symbol)
            for use in uses:
                self._mark_class(use, symbol)
            return
        name = str(names.pop())
        if symbol in _RENAMED:  # a method: its class is imported
            name, _, method = name.rpartition(".")
        self.classes[symbol] = name
        for use in uses:
            if symbol in _RENAMED:
                self.edits.replace(use.node, f"{name.rpartition('.')[2]}.{method}")
            if use.call is not None:
                self._arguments(symbol, use.call)

    def _arguments(self, symbol: str, call: ast.Call) -> None:
        """Give a call torch's arguments, and note what else to know."""
        write_arguments(symbol, call, self.edits)
        message = note(symbol, call, self.edits)
        if message is not None:
            self.edits.note(call, message)

    def _mark_use(self, node: ast.AST, symbol: str) -> None:
        self.edits.mark(node, f"{canonical(symbol)}: {_why_left(symbol)}")

    def _mark_class(self, use: Use, symbol: str) -> None:
        """Mark a use of a class with the arguments that torch has nothing for, if these are the reason."""
        refused = refused_arguments(symbol, use.call, self.edits)
        if refused and use.name is None:
            lacks = f"torch has no {', '.join(refused)}; import it from ampcompat, or {_why_left(symbol)}"
            self.edits.mark(use.node, f"{canonical(symbol)}: {lacks}")
        else:
            self._mark_use(use.node, symbol)

    def _bare_names(self) -> None:
        """``apex`` of ``import apex`` by itself, as in ``if apex is None``."""
        bound = [name for name, symbol in self.source.bindings.names.items() if symbol == "apex"]
        for node in self.source.kind(ast.Name):
            parent = self.source.parents.get(node)
            if node.id not in bound or isinstance(parent, ast.Attribute) or self.source.apex(node) != "apex":
                continue  # of another name, or a parameter of that name
            # As in hasattr(apex, "amp"): native_amp has no such part.
            is_handed_on = isinstance(node.ctx, ast.Load) and not isinstance(parent, _TESTS)
            if self.needs_amp and not is_handed_on:
                self.edits.replace(node, NAME)
            elif isinstance(node.ctx, ast.Load):
                self.left.add("apex")
                self.edits.mark(node, "the package apex is handed on or tested here; nothing takes its place")

    def _probe(self, text: ast.Constant) -> None:
        """``import_module("apex.amp")``; ``find_spec("apex")`` asks whether it is there."""
        call = self.source.parents[text]
        asks = isinstance(call, ast.Call) and last_name(call.func) == "find_spec"
        if text.value == "apex.amp" or asks:
            self.needs_amp = True
            quote = self.edits.text(text)[-1]
            self.edits.replace(text, f"{quote}{self._module()}{quote}")
        else:
            self.edits.mark(text, f"{text.value!s} is looked for by its name; write import {NAME} for apex.amp")

    def _libraries(self) -> None:
        """Mark where a library is told to use apex, which it imports itself."""
        for node, name in uses_of_apex(self.source):
            if not isinstance(node, ast.alias):  # the import of a name does no harm
                instead = IN_PLACE_OF_ARGUMENT if isinstance(node, ast.Constant) else IN_PLACE_OF_CLASS
                self.edits.mark(node, f"{name}: {instead}")

    # -- imports -------------------------------------------------------------------------------------------------------
    def _module(self) -> str:
        return f"{self.package}.{NAME}" if self.package else NAME

    def _amp_import(self, bound: str) -> str:
        """The statement that binds ``native_amp`` to a name."""
        self.needs_amp = True
        renamed = "" if bound == NAME else f" as {bound}"
        return f"from {self.package} import {NAME}{renamed}" if self.package else f"import {NAME}{renamed}"

    def _import(self, node: ast.Import) -> None:
        if not any(is_apex(alias.name) for alias in node.names):
            return
        new: list[str] = []
        left: list[ast.alias] = []
        others = [alias for alias in node.names if not is_apex(alias.name)]
        for alias in node.names:
            if alias in others:
                continue
            bound = alias.asname or alias.name.partition(".")[0]
            symbol = alias.name if alias.asname else bound
            if symbol == "apex.amp":
                new.append(self._amp_import(bound))
            elif symbol in self.left or (bound in self.source.bindings.ambiguous and symbol not in MODULES):
                left.append(alias)
            if symbol == "apex" and self.needs_amp:
                new.append(self._amp_import(NAME))
        if others:
            new.append(f"import {listed(others)}")
        self._put(node, list(dict.fromkeys(new)), f"import {listed(left)}" if left else "", [a.name for a in left])

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None or not is_apex(node.module):
            return
        new: list[str] = []
        from_amp: list[ast.alias] = []
        left: list[ast.alias] = []
        for alias in node.names:
            symbol = f"{node.module}.{alias.name}"
            bound = alias.asname or alias.name
            if symbol == "apex.amp":
                new.append(self._amp_import(bound))
            elif alias.name == "*":
                self._star(node.module, new, left, alias)
            elif node.module in ("apex.amp", *FLATTENED):
                (from_amp if has(alias.name) else left).append(alias)
            elif symbol in self.classes:
                new.append(_import_of(self.classes[symbol], bound, symbol))
            elif self._is_left(symbol, bound):
                left.append(alias)
        if from_amp:
            self.needs_amp = True
            new.append(f"from {self._module()} import {listed(from_amp)}")
        names = [f"{node.module}.{alias.name}" for alias in left]
        self._put(node, list(dict.fromkeys(new)), f"from {node.module} import {listed(left)}" if left else "", names)

    def _star(self, module: str, new: list[str], left: list[ast.alias], alias: ast.alias) -> None:
        if module == "apex.amp":
            self.needs_amp = True
            new.append(f"from {self._module()} import *")
        elif any(name.startswith(f"{module}.") for name in self.left):
            left.append(alias)

    def _is_left(self, symbol: str, bound: str) -> bool:
        """Whether an import stays: something reads what it binds, and nothing took its place."""
        if symbol in self.left:
            return True
        return symbol not in MODULES and symbol not in TO_FLOAT and bound in self.reads

    def _put(self, node: ast.stmt, new: list[str], left: str, names: list[str]) -> None:
        # The uses of the others say it.
        message = "; ".join(f"{name}: {_why_left(name)}" for name in names if name not in self.uses)
        if left and not new:
            if message:
                self.edits.mark(node, message)
        else:
            self.edits.replace_statement(node, new, left, message)


_RENAMED = ("apex.parallel.convert_syncbn_model",)


def _import_of(name: str, bound: str, symbol: str) -> str:
    """The import of a class of torch under the name that the file has for it."""
    module, _, last = name.rpartition(".")
    renamed = "" if bound == last or symbol in _RENAMED else f" as {bound}"
    return f"from {module} import {last}{renamed}"


def _why_left(symbol: str) -> str:
    """What to do about a symbol that is left."""
    if symbol == "apex":
        return "what is left of it is marked below; delete this line when nothing is"
    if symbol.startswith("apex.amp."):
        name = symbol.rpartition(".")[2]
        return f"it is {NAME}.{name}" if has(name) else INSTEAD.get(name, f"{NAME} does not have it")
    known = verdict(symbol)
    of_ampcompat = "torch has nothing of the same meaning; import it from ampcompat"
    return advice(symbol) or (known.note if known.verdict == UNSUPPORTED else of_ampcompat)


def _is_loss_scaler(node: ast.expr) -> bool:
    """Whether an expression is ``....loss_scalers[0]``."""
    return isinstance(node, ast.Subscript) and last_name(node.value) == "loss_scalers"


def _names_of_loss_scalers(source: Source) -> set[tuple[ast.AST, str]]:
    """Names of loss scalers, each with its scope: ``s = ....loss_scalers[0]``, ``for s in ....loss_scalers``."""
    targets = [node.targets[0] for node in source.kind(ast.Assign) if _is_loss_scaler(node.value)]
    targets += [node.target for node in source.kind(ast.For) if last_name(node.iter) == "loss_scalers"]
    return {(source.scope(target), target.id) for target in targets if isinstance(target, ast.Name)}


def _chain(node: ast.expr) -> list[ast.expr]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    chain = [node]
    while isinstance(chain[0], ast.Attribute):
        chain.insert(0, chain[0].value)
    return chain


def _names_read(source: Source) -> set[str]:
    """Names that a file reads or exports."""
    names = {node.id for node in source.kind(ast.Name) if isinstance(node.ctx, ast.Load)}
    exported = [node.value for node in source.kind(ast.Assign) if last_name(node.targets[0]) == "__all__"]
    texts = [part.value for value in exported for part in ast.walk(value) if isinstance(part, ast.Constant)]
    return names | set(map(str, texts))


def _binds_torch(source: Source) -> bool:
    """Whether the module imports torch itself, or one of its modules, under the name ``torch``."""
    return any(
        alias.asname == "torch" or (alias.asname is None and alias.name.partition(".")[0] == "torch")
        for node in source.tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    )


def _import_torch(edits: Edits) -> None:
    """Put ``import torch`` above the first statement, below the docstring and imports of ``__future__``."""
    for node in edits.source.tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            edits.insert_above(node, "import torch")
            break
