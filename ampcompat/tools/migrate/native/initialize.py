"""``amp.initialize`` becomes ``mixed_precision``: what each of its arguments turns into."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampcompat.tools.migrate.native.edits import SCALER, Edits
from ampcompat.tools.migrate.native.facts import Facts, Initialize
from ampcompat.tools.migrate.native.home import Home
from ampcompat.tools.migrate.native.imports import is_docstring
from ampcompat.tools.migrate.native.nodes import argument, elements
from ampcompat.tools.migrate.text import code_of

HELPER = "mixed_precision"
#: A scaler that does nothing.
SWITCHED_OFF = "torch.amp.GradScaler(enabled=False)"
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
BFLOAT16 = ("O4", "O5")
HALF_WEIGHTS = ("O2", "O3", "O5")
#: Arguments that autocast over float32 weights has no use for.
DROPPED = ("keep_batchnorm_fp32", "master_weights", "patch_torch_functions", "min_loss_scale", "max_loss_scale")
#: Arguments that are looked up where the call gets a dict.
FROM_DICT = {"opt_level": '"opt_level", "O1"', "enabled": '"enabled", True', "loss_scale": '"loss_scale"'}
PLACES = ("models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions",
          "keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs")  # fmt: skip


class Unclear(Exception):
    """A call that is left to the reader; the message says why."""


def replace_initialize(facts: Facts, home: Home, edits: Edits, used: bool) -> None:
    """Replace each ``amp.initialize`` by the helper, and define the scaler on all paths to its uses."""
    for made in facts.initialized:
        try:
            _Replacement(facts, home, edits, used, made).make()
        except Unclear as problem:
            edits.mark(facts.file.statement(made.call), str(problem))


class _Replacement:
    def __init__(self, facts: Facts, home: Home, edits: Edits, used: bool, made: Initialize) -> None:
        self.facts = facts
        self.file = facts.file
        self.home = home
        self.edits = edits
        self.used = used and made.optimizers is not None
        self.made = made
        self.function = facts.file.function(made.call)
        self.conditions: list[str] = []

    def make(self) -> None:
        """Replace the statement of the call, or the ``if`` that holds nothing else."""
        statement = self.file.statement(self.made.call)
        if any(arg.star == "*" for arg in self.made.call.args) or len(self._dicts()) > 1:
            raise Unclear(self._by_hand("its arguments come from a list, or from several dicts"))
        line = self.file.line_of(statement)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) != 1:
            raise Unclear(self._by_hand("it shares its line with other statements"))
        branch = self._lone_branch(line)
        if branch is not None:
            self.conditions.append(_operand(branch.test))
        new = self._statements(statement)
        if branch is not None:
            self.edits.statements[branch] = lambda _: [cst.parse_statement(code) for code in new]
        else:
            self.edits.statements[statement] = lambda _: [cst.parse_statement(code) for code in new]
            self._define_elsewhere(statement)
        self._declare_global()

    def _by_hand(self, reason: str) -> str:
        models = code_of(self.made.models)
        return f"amp.initialize is left: {reason}. By hand: {SCALER} = {HELPER}({models}, enabled=..., loss_scale=None)"

    # The statement.

    def _statements(self, statement: cst.CSTNode) -> list[str]:
        made = self.made
        given = code_of(made.models)
        if made.optimizers is not None:
            given = f"{given}, {code_of(made.optimizers)}"
        scaler = self.home.scaler(self.function)
        if isinstance(statement, cst.Return) and statement.value is made.call:
            if not _is_plain(made.models):
                raise Unclear(self._by_hand("its model has no name"))
            return [*self._helper(code_of(made.models), scaler), f"return {given}"]
        if isinstance(statement, cst.Expr) and statement.value is made.call:
            return self._helper(code_of(made.models), scaler)
        if not isinstance(statement, cst.Assign) or statement.value is not made.call or made.target is None:
            raise Unclear(self._by_hand("it is no statement of its own"))
        models = self._bound_models()
        codes = []
        target = code_of(made.target)
        if len(statement.targets) > 1 or not self._same(made.target):
            names = " = ".join(code_of(t.target) for t in statement.targets)
            codes.append(f"{names} = {given}")
        elif target != given and not _is_plain(made.models):
            codes.append(f"{target} = {given}")
        return [*codes, *self._helper(models, scaler)]

    def _bound_models(self) -> str:
        """The models by the name that they have after the statement."""
        targets = elements(self.made.target)
        if self.made.optimizers is None:
            return code_of(self.made.target) if self.made.target is not None else code_of(self.made.models)
        if targets is not None and len(targets) == 2:
            return _as_list(targets[0])
        if not _is_plain(self.made.models):
            return f"{code_of(self.made.target)}[0]" if self.made.target is not None else ""
        return _as_list(self.made.models)

    def _same(self, target: cst.BaseExpression) -> bool:
        """Whether the result is bound to the names that were given."""
        if self.made.optimizers is None:
            return _names(target) == _names(self.made.models)
        targets = elements(target)
        if targets is None or len(targets) != 2:
            return False
        return [_names(one) for one in targets] == [_names(self.made.models), _names(self.made.optimizers)]

    def _helper(self, models: str, scaler: str) -> list[str]:
        call = f"{HELPER}({', '.join([models, *self._options()])})"
        if not self.used:
            return [call]
        return [f"{scaler} = {call}"]

    # Its arguments.

    def _dicts(self) -> list[cst.BaseExpression]:
        """The dicts whose entries the call gets as arguments."""
        return [arg.value for arg in self.made.call.args if arg.star == "**"]

    def _argument(self, name: str) -> cst.BaseExpression | None:
        position = PLACES.index(name) if name in PLACES else 99
        value = argument(self.made.call, position, name)
        if value is not None:
            return None if code_of(value) == "None" else value
        for entries in self._dicts():
            if name in FROM_DICT:
                return cst.parse_expression(f"{_operand(entries)}.get({FROM_DICT[name]})")
        return None

    def _options(self) -> list[str]:
        level = self._argument("opt_level")
        literal = "O1" if level is None else _literal(level)
        if literal is not None and literal not in LEVELS:
            raise Unclear(self._by_hand(f"{literal!r} is no opt_level"))
        options = []
        enabled = self._enabled(level, literal)
        if enabled != "True":
            options.append(f"enabled={enabled}")
        options += self._dtype(level, literal)
        if enabled != "False":
            options += self._loss_scale(literal)
        self._say_what_changes(literal)
        return options

    def _enabled(self, level: cst.BaseExpression | None, literal: str | None) -> str:
        conditions = list(self.conditions)
        enabled = self._argument("enabled")
        if enabled is not None and _truth(enabled) is None:
            conditions.append(_operand(enabled))
        if literal == "O0" or (enabled is not None and _truth(enabled) is False):
            return "False"
        if literal is None and level is not None:
            conditions.append(f'{_operand(level)} != "O0"')
        conditions = list({condition.replace("'", '"'): condition for condition in conditions}.values())
        return " and ".join(conditions) if conditions else "True"

    def _dtype(self, level: cst.BaseExpression | None, literal: str | None) -> list[str]:
        cast = self._argument("cast_model_type")
        if cast is not None and code_of(cast).endswith("bfloat16"):
            return ["dtype=torch.bfloat16"]
        if literal in BFLOAT16:
            return ["dtype=torch.bfloat16"]
        names_bfloat16 = any(name in text.value for text in self.file.of_type(cst.SimpleString) for name in BFLOAT16)
        if literal is None and level is not None and names_bfloat16:
            return [f'dtype=torch.bfloat16 if {_operand(level)} in ("O4", "O5") else torch.float16']
        return []

    def _loss_scale(self, literal: str | None) -> list[str]:
        value = self._argument("loss_scale")
        if literal in BFLOAT16:
            return []
        if value is None:
            return ["loss_scale=1.0"] if literal == "O3" else []
        text = _literal(value)
        if text is None:
            return [f"loss_scale={code_of(value)}"]
        if text == "dynamic":
            return []
        try:
            return [f"loss_scale={float(text)}"]
        except ValueError:
            raise Unclear(self._by_hand(f"loss_scale={text!r} is no number")) from None

    def _say_what_changes(self, literal: str | None) -> None:
        outputs = self._argument("cast_model_outputs")
        if outputs is not None and not code_of(outputs).endswith("float32"):
            self.edits.note(f"cast_model_outputs={code_of(outputs)} of amp.initialize: the model returns float32 now")
        if literal in HALF_WEIGHTS or literal is None:
            self.edits.note("O2, O3 and O5 become autocast over float32 weights, which also take the masters' place")
        dropped = [name for name in DROPPED if self._argument(name) is not None]
        if dropped:
            self.edits.note(f"{', '.join(dropped)} of amp.initialize: dropped, torch.amp has nothing like it")

    # The scaler on other paths.

    def _lone_branch(self, line: cst.CSTNode) -> cst.If | None:
        """The ``if`` around the call, where it holds nothing else that stays and binds nothing new."""
        if isinstance(line, cst.If) and isinstance(line.body, cst.SimpleStatementSuite):
            alone = len(line.body.body) == 1 and line.orelse is None and self.made.target is not None
            return line if alone and self.made.target is not None and self._same(self.made.target) else None
        block = self.file.parents.get(line)
        branch = self.file.parents.get(block) if block is not None else None
        if not isinstance(branch, cst.If) or branch.orelse is not None or branch.body is not block:
            return None
        if isinstance(self.file.parents.get(branch), cst.If) or not isinstance(block, cst.IndentedBlock):
            return None
        if self.made.target is None or not self._same(self.made.target):
            return None
        if self.home.kind == "attribute" and self.function is None:
            return None
        others = [s for s in block.body if s is not line]
        if not all(imports_apex_only(s, self.facts) for s in others):
            return None
        return branch

    def _define_elsewhere(self, statement: cst.CSTNode) -> None:
        """Define a scaler that is switched off where the call stands in a branch."""
        if not self.used or self.home.kind == "global":
            return
        outermost: cst.CSTNode | None = None
        for parent in self.file.ancestors(statement):
            if parent is self.function:
                break
            if isinstance(parent, cst.If):
                outermost = parent
            elif isinstance(parent, cst.For | cst.While | cst.With | cst.Try) and outermost is not None:
                break
        if outermost is not None and not self._all_branches(outermost):
            self.edits.insert_before(outermost, f"{self.home.scaler(self.function)} = {SWITCHED_OFF}")

    def _all_branches(self, branch: cst.CSTNode) -> bool:
        """Whether each branch of an ``if`` makes a scaler."""
        makers = [self.file.line_of(made.call) for made in self.facts.initialized if made.optimizers is not None]
        while isinstance(branch, cst.If):
            if not any(line in branch.body.body for line in makers):
                return False
            if branch.orelse is None:
                return False
            branch = branch.orelse
        return isinstance(branch, cst.Else) and any(line in branch.body.body for line in makers)

    def _declare_global(self) -> None:
        if self.home.kind != "global" or not self.used or self.function is None:
            return
        body: Sequence[cst.CSTNode] = self.function.body.body
        start = 1 if len(body) > 1 and is_docstring(body[0]) else 0
        first = body[start]
        statement = first.body[0] if isinstance(first, cst.SimpleStatementLine) else first
        self.edits.insert_before(statement, f"global {self.home.name}")


def never_scales(facts: Facts) -> bool:
    """Whether every call asks for a loss scale of 1, by its level or by itself."""
    for made in facts.initialized:
        level = argument(made.call, PLACES.index("opt_level"), "opt_level")
        scale = argument(made.call, PLACES.index("loss_scale"), "loss_scale")
        literal = _literal(scale) if scale is not None else None
        by_level = level is not None and scale is None and _literal(level) in ("O0", "O3", *BFLOAT16)
        if not by_level and literal not in ("1", "1.0"):
            return False
    return True


def imports_apex_only(statement: cst.CSTNode, facts: Facts) -> bool:
    """Whether a statement only imports apex, or tries to."""
    if isinstance(statement, cst.Try):
        return all(imports_apex_only(part, facts) for part in statement.body.body)
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return all(_imports_apex(part) for part in statement.body)


def _imports_apex(part: cst.BaseSmallStatement) -> bool:
    if isinstance(part, cst.Import):
        return all(code_of(alias.name).split(".")[0] in ("apex", "ampcompat") for alias in part.names)
    if isinstance(part, cst.ImportFrom) and part.module is not None and not part.relative:
        return code_of(part.module).split(".")[0] in ("apex", "ampcompat")
    return False


def _is_plain(node: cst.BaseExpression) -> bool:
    """Whether an expression is a name, an attribute, or a list of such."""
    inner = elements(node)
    if inner is not None:
        return all(map(_is_plain, inner))
    return isinstance(node, cst.Name | cst.Attribute | cst.Subscript)


def _names(node: cst.BaseExpression) -> list[str]:
    inner = elements(node)
    return [code_of(one) for one in inner] if inner is not None else [code_of(node)]


def _as_list(node: cst.BaseExpression) -> str:
    inner = elements(node)
    return f"[{', '.join(map(code_of, inner))}]" if inner is not None else code_of(node)


def _literal(node: cst.BaseExpression) -> str | None:
    """The value of a string or number as text; None for other expressions."""
    if isinstance(node, cst.SimpleString):
        return str(node.raw_value)
    if isinstance(node, cst.Float | cst.Integer):
        return str(node.evaluated_value)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Power):
        base, power = _literal(node.left), _literal(node.right)
        if base is not None and power is not None:
            return str(float(base) ** float(power))
    return None


def _truth(node: cst.BaseExpression) -> bool | None:
    """Whether a literal is true; None for other expressions."""
    text = code_of(node)
    if text in ("True", "False"):
        return text == "True"
    literal = _literal(node)
    if literal is None:
        return None
    return literal not in ("", "0", "0.0")


def _operand(node: cst.BaseExpression) -> str:
    """The text of an expression, in brackets where it stands beside ``and`` or ``!=``."""
    simple = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or bool(node.lpar)
    comparison = isinstance(node, cst.Comparison | cst.UnaryOperation)
    text = code_of(node)
    return text if simple or comparison else f"({text})"
