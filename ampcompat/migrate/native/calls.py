"""Second pass: replace the calls of ``apex.amp`` and the steps of the optimizers that it manages."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

import libcst as cst

from ampcompat.migrate.casts import MOVES
from ampcompat.migrate.marks import code_of, marked
from ampcompat.migrate.native.facts import Facts
from ampcompat.migrate.native.patterns import contains_scaled, is_layout, receiver, scaled_call, symbol
from ampcompat.migrate.native.places import Places
from ampcompat.migrate.native.scaler import made_lines, switched_off_lines
from ampcompat.migrate.native.unscaling import Unscaling, calls_in, steps

PARAMS = "(p for group in {}.param_groups for p in group['params'])"


def statement(code: str) -> cst.BaseStatement:
    """One statement from its source text."""
    return cst.parse_statement(code)


class Calls(cst.CSTTransformer):
    """Works block by block: a statement may become several."""

    def __init__(self, facts: Facts, places: Places, shown: Callable[[int], bool]) -> None:
        self.shown = shown
        self.facts, self.bindings, self.places = facts, facts.bindings, places
        self.loop_targets: list[str] = []
        source = facts.source
        named = [n for n in source.nodes if isinstance(n, ast.Name | ast.Attribute) and source.apex(n)]
        self.apex_lines = {node.lineno for node in named}
        self.looked_into: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        # Inside a line that names nothing of apex no expression is replaced.
        if isinstance(node, cst.SimpleStatementLine):
            start, end = self.places[node]
            if not any(start <= line <= end for line in self.apex_lines):
                return False
        return not is_layout(node) and super().on_visit(node)

    def visit_Module(self, node: cst.Module) -> None:
        self.unscaling = Unscaling(node, self.facts, self.places, self.shown)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        body = updated_node.body
        if isinstance(body, cst.IndentedBlock):
            return updated_node.with_changes(body=body.with_changes(body=self._defaults(body.body)))
        return updated_node

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body = self._defaults(self._block(original_node.body, updated_node.body))
        return with_torch(updated_node.with_changes(body=body))

    def visit_For(self, node: cst.For) -> None:
        self.loop_targets.append(code_of(node.target))

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        self.loop_targets.pop()
        return updated_node

    def visit_Subscript(self, node: cst.Subscript) -> None:
        self.looked_into.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self.looked_into.add(node.value)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name, facts = symbol(original_node.func, self.bindings), self.facts
        if name == "apex.amp.disable_casts":
            return cst.parse_expression(f"torch.autocast(device_type={facts.device}, enabled=False)")
        if name == "apex.amp.master_params" and len(original_node.args) == 1:
            return cst.parse_expression(PARAMS.format(code_of(original_node.args[0].value)))
        # What is saved is loaded again; who looks into it knows apex's keys.
        if name == "apex.amp.state_dict" and original_node not in self.looked_into:
            many = f"[scaler.state_dict() for scaler in {facts.scaler}]"
            return cst.parse_expression(many if facts.many else f"{facts.scaler}.state_dict()")
        return updated_node

    def _defaults(self, body: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        """Amp is off until the ``if`` around ``initialize`` turned it on."""
        new = list(body)
        made = f"{self.facts.scaler} = "
        for index, part in enumerate(body):
            if self.facts.branch is not None and isinstance(part, cst.If) and made in code_of(part):
                lines = [statement(line) for line in switched_off_lines(self.facts)]
                lines[0] = lines[0].with_changes(leading_lines=part.leading_lines)
                new[index : index + 1] = [*lines, part.with_changes(leading_lines=[])]
        return new

    def _block(
        self, original: Sequence[cst.BaseStatement], updated: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        result: list[cst.BaseStatement] = []
        for index, (old, new) in enumerate(zip(original, updated, strict=True)):
            for optimizer in self.unscaling.before.get(old, ()):
                call = f"{self.facts.scaler_of[optimizer]}.unscale_({optimizer})"
                if optimizer in self.facts.containers:
                    call = call.replace(f"({optimizer})", "(amp_optimizer)")
                    call = f"for amp_optimizer in {optimizer}:\n    {call}\n"
                result.append(statement(call).with_changes(leading_lines=getattr(new, "leading_lines", ())))
                new = new.with_changes(leading_lines=[])
            if old in self.unscaling.marks:
                new = marked(new, self.unscaling.marks[old])
            replaced = self._replaced(old, new, original[index + 1 :])
            lines = getattr(new, "leading_lines", ())
            if replaced and replaced[0] is not new:
                own = getattr(replaced[0], "leading_lines", ())
                replaced[0] = replaced[0].with_changes(leading_lines=[*lines, *own])
            result += replaced
        return result

    def _replaced(
        self, old: cst.BaseStatement, new: cst.BaseStatement, later: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        if scaled_call(old, self.bindings) is not None:
            return self._backward(cst.ensure_type(new, cst.With))
        if isinstance(old, cst.For) and isinstance(new, cst.For):
            return self._loop(old, new) or [new]
        if not isinstance(old, cst.SimpleStatementLine) or len(old.body) != 1:
            return [new]
        part = old.body[0]
        value = part.value if isinstance(part, cst.Expr | cst.Assign) else None
        if not isinstance(value, cst.Call):
            return [new]
        name, called = symbol(value.func, self.bindings), code_of(value.func)
        if name == "apex.amp.initialize":
            lines = [statement(line) for line in made_lines(self.facts)]
            return [lines[0].with_changes(trailing_whitespace=old.trailing_whitespace), *lines[1:]]
        if name == "apex.amp.load_state_dict" and value.args and isinstance(part, cst.Expr):
            return [self._load(code_of(value.args[0].value))]
        optimizer = receiver(value)
        if called.endswith(".step") and optimizer in self.facts.scaler_of and self._is_step(old):
            if value.args:
                return [marked(new, "GradScaler.step takes no closure; evaluate the loss before the step")]
            return self._step(new, optimizer, later)
        return [new]

    def _is_step(self, old: cst.BaseStatement) -> bool:
        return self.places[old][0] in self.facts.step_lines

    def _loop(self, old: cst.For, new: cst.For) -> list[cst.BaseStatement] | None:
        """``for o in optimizers: o.step()``: one update after all of the steps, which share a scaler."""
        stepped = {n for n in self.facts.scaler_of if steps(old.body, self.facts, n)}
        target = code_of(old.target)
        names = {code_of(call.func).removesuffix(".step") for call in calls_in(old.body)} & set(self.facts.scaler_of)
        if target not in names or not stepped or contains_scaled(old, self.bindings) or not self._steps_line(old):
            return None
        scaler = self.facts.scaler_of[target]
        return [new, statement(f"{scaler}.update()")]

    def _steps_line(self, old: cst.For) -> bool:
        start, end = self.places[old]
        return any(start <= line <= end for line in self.facts.step_lines)

    def _used_later(self, name: str) -> bool:
        """Whether the scaled loss is used outside the blocks that make it, and nothing else has its name."""
        source = self.facts.source
        inside = {n for block in source.scaled_blocks() for n in ast.walk(block)}
        named = [n for n in source.nodes if isinstance(n, ast.Name) and n.id == name and n not in inside]
        return bool(named) and not any(isinstance(n.ctx, ast.Store) for n in named)

    def _load(self, saved: str) -> cst.BaseStatement:
        scaler = self.facts.scaler
        code = f"{scaler}.load_state_dict({saved})"
        if self.facts.many:
            code = f"for scaler, saved in zip({scaler}, {saved}):\n    scaler.load_state_dict(saved)\n"
        return marked(statement(code), "checkpoints written by apex hold loss_scaler0 etc.; GradScaler refuses them")

    def _step(
        self, new: cst.BaseStatement, optimizer: str, later: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        """``step``, and ``update`` after the last step before gradients are scaled again."""
        scaler = self.facts.scaler_of[optimizer]
        tail = getattr(new, "trailing_whitespace", cst.TrailingWhitespace())
        body = cst.ensure_type(new, cst.SimpleStatementLine).body[0]
        step = cst.parse_expression(f"{scaler}.step({optimizer})")
        lines: list[cst.BaseStatement] = [
            cst.SimpleStatementLine([body.with_changes(value=step)], trailing_whitespace=tail)
        ]
        if optimizer in self.loop_targets:
            return lines
        for part in later:
            if contains_scaled(part, self.bindings):
                break
            same = self.facts.same
            others = [o for o, owner in self.facts.scaler_of.items() if owner == scaler and not same(o, optimizer)]
            if any(called_last(call) == "step" and receiver(call) in others for call in calls_in(part)):
                return lines
        return [*lines, statement(f"{scaler}.update()")]

    def _backward(self, block: cst.With) -> list[cst.BaseStatement]:
        """``scaler.scale(loss).backward()``, or the body of the block on a scaled loss of the same name."""
        call = cst.ensure_type(block.items[0].item, cst.Call)
        loss = code_of(call.args[0].value)
        key = next((code_of(a.value) for a in call.args if a.keyword and a.keyword.value == "loss_id"), None)
        if key is None:
            key = code_of(call.args[2].value) if len(call.args) > 2 and call.args[2].keyword is None else "0"
        scaler = self.facts.loss_scaler[key]
        lines: list[cst.BaseStatement] = []
        if any(called_last(call) not in MOVES for call in calls_in(cst.parse_expression(loss))):
            lines.append(statement(f"with {self.facts.autocast()}:\n    amp_loss = {loss}\n"))
            loss = "amp_loss"
        asname = block.items[0].asname
        scaled = code_of(asname.name) if asname is not None else None
        body = block.body.body
        first = body[0]
        simple = cst.SimpleStatementLine
        suite = isinstance(block.body, cst.SimpleStatementSuite)
        code = code_of(first).strip() if len(body) == 1 and isinstance(first, simple) and not suite else ""
        code = code_of(first).strip().rstrip(";") if suite and len(body) == 1 else code
        if scaled and code.startswith(f"{scaled}.backward(") and not self._used_later(scaled):
            line = statement(f"{scaler}.scale({loss}){code[len(scaled) :]}")
            above = getattr(first, "leading_lines", ())
            return [*lines, line.with_changes(leading_lines=above) if not lines else line]
        if scaled:
            lines.append(statement(f"{scaled} = {scaler}.scale({loss})"))
        rest = [simple([p]) for p in body if isinstance(p, cst.BaseSmallStatement)] if suite else body
        return [*lines, *rest]


def with_torch(module: cst.Module) -> cst.Module:
    """``module`` with an import of torch."""
    body: list[cst.BaseStatement] = list(module.body)
    if any(_imports_torch(part) for part in body):
        return module
    first = next((i for i, part in enumerate(body) if _imports_anything(part)), 0)
    body.insert(first, statement("import torch"))
    return module.with_changes(body=body)


def called_last(call: cst.Call) -> str:
    """The last name of what is called."""
    return code_of(call.func).rpartition(".")[2]


def _imports_anything(part: cst.BaseStatement) -> bool:
    return (
        isinstance(part, cst.SimpleStatementLine)
        and isinstance(part.body[0], cst.Import | cst.ImportFrom)
        and ("__future__" not in code_of(part))
    )


def _imports_torch(part: cst.BaseStatement) -> bool:
    if not isinstance(part, cst.SimpleStatementLine):
        return False
    names = [a for small in part.body if isinstance(small, cst.Import) for a in small.names if a.asname is None]
    return any(code_of(alias.name).partition(".")[0] == "torch" for alias in names)
