"""What the translation must know of a file before it changes anything."""

from __future__ import annotations

import ast
import re

from ampcompat.check.source import SCOPES, Source, argument, number, text

HALF = "torch.float16"
BRACKETS = re.compile(r"[()\[\]]")


class Untranslatable(Exception):
    """The file uses amp in a way that has no safe mechanical translation; the message says which."""


class Facts:
    """One ``initialize`` call and everything that refers to it.

    Attributes:
        models: Source text of each model, e.g. ``self.model``.
        optimizers: Source text of each optimizer.
        scaler_of: Source text of the scaler that steps an optimizer.
        dtype: Source text of the autocast dtype.
        enabled: Source text of the condition under which amp is on, None for always.
        before: Defaults to set before the outermost ``if`` around ``initialize``, None when it is unconditional.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.bindings = source, source.bindings
        calls = source.calls_to("apex.amp.initialize")
        if len(calls) != 1:
            raise Untranslatable(f"{len(calls) or 'no'} calls of amp.initialize in this file; one is needed")
        (self.call,) = calls
        statement = source.parents.get(self.call)
        if not isinstance(statement, ast.Assign | ast.Expr) or (
            isinstance(statement, ast.Assign) and len(statement.targets) != 1
        ):
            raise Untranslatable("amp.initialize is not a statement of its own or `model, optimizer = ...`")
        self.statement = statement
        if any(k.arg is None for k in self.call.keywords) or any(isinstance(a, ast.Starred) for a in self.call.args):
            raise Untranslatable("amp.initialize takes its arguments from a dict or list")
        self._names()
        self._level()
        self._place()
        self._scalers()

    def option(self, position: int, name: str) -> ast.expr | None:
        """An argument of ``initialize``; ``None`` literals count as absent."""
        value = argument(self.call, position, name)
        return None if isinstance(value, ast.Constant) and value.value is None else value

    def _names(self) -> None:
        given = [self.option(0, "models"), self.option(1, "optimizers")]
        target = self.statement.targets[0] if isinstance(self.statement, ast.Assign) else None
        bound = list(target.elts) if isinstance(target, ast.Tuple) and given[1] is not None else [target]
        names = []
        for value, name in zip(given, [*bound, None], strict=False):
            chosen = name if name is not None else value
            many = chosen.elts if isinstance(chosen, ast.List | ast.Tuple) else [chosen]
            names.append([ast.unparse(one) for one in many if one is not None])
        self.models, self.optimizers = names[0], (names[1] if len(names) > 1 else [])
        wanted = ", ".join(ast.unparse(v) for v in given if v is not None)
        self.rebinds = None
        if target is not None and BRACKETS.sub("", ast.unparse(target)) != BRACKETS.sub("", wanted):
            self.rebinds = f"{ast.unparse(target)} = {wanted}"

    def _level(self) -> None:
        level, enabled = self.option(3, "opt_level"), self.option(2, "enabled")
        self.dtype, self.notes, self.enabled = HALF, list[str](), None
        self.static = False
        if level is None or isinstance(level, ast.Constant):
            name = "O1" if level is None else str(level.value)
            if name in ("O3", "O5") or name not in ("O0", "O1", "O2", "O4"):
                raise Untranslatable(f"opt_level {name} keeps no float32 weights; torch.amp has no such mode")
            if name == "O4":
                self.dtype, self.static = "torch.bfloat16", True
            if name == "O0":
                self.enabled = "False"
        else:
            self.enabled = f"{ast.unparse(level)} != 'O0'"
            self.notes.append("every opt_level but O0 now means autocast; O3 and other keywords have no counterpart")
        if enabled is not None and not (isinstance(enabled, ast.Constant) and enabled.value):
            condition = f"bool({ast.unparse(enabled)})"
            self.enabled = condition if self.enabled is None else f"{condition} and {self.enabled}"

    def _place(self) -> None:
        """Where scaler and device live: beside ``self.optimizer``, in the function, or as globals of the file."""
        source = self.source
        scope = source.scope(self.call)
        uses = [c for c in source.calls if (source.apex(c.func) or "").startswith("apex.amp.")]
        uses += [c for c in source.calls if isinstance(c.func, ast.Attribute) and text(c.func.value) in self.optimizers]
        on_self = bool(self.optimizers) and all(name.startswith("self.") for name in self.optimizers)
        self.prefix = "self." if on_self else ""
        self.is_global = not on_self and scope is not source.tree and any(source.scope(u) is not scope for u in uses)
        taken = {n.id for n in source.nodes if isinstance(n, ast.Name)} | {
            n.attr for n in source.nodes if isinstance(n, ast.Attribute)
        }
        self.many = self.option(10, "num_losses") is not None
        name = "scalers" if self.many else "scaler"
        self.scaler = self.prefix + (f"amp_{name}" if name in taken else name)
        self.device, self.switch = f"{self.prefix}amp_device", f"{self.prefix}amp_enabled"
        branches = []
        for parent in source.ancestors(self.statement):
            if isinstance(parent, SCOPES):
                break
            if isinstance(parent, ast.For | ast.While | ast.Try):
                raise Untranslatable("amp.initialize is called in a loop or a try")
            branches += [parent] if isinstance(parent, ast.If) else []
        self.branch = branches[-1] if branches else None
        self.switched = self.enabled is not None or self.branch is not None
        if self.branch is not None and not isinstance(source.parents.get(self.branch), (*SCOPES, ast.Module)):
            raise Untranslatable("amp.initialize is called under an `if` inside another block")

    def _scalers(self) -> None:
        """One scaler for an optimizer: losses that share one share a scale, since their gradients are added."""
        self.loss_scaler: dict[str, str] = {}
        users: dict[str, set[str]] = {}
        for call in self.source.calls_to("apex.amp.scale_loss"):
            loss_id, given = argument(call, 2, "loss_id"), argument(call, 1, "optimizers")
            key = ast.unparse(loss_id) if loss_id is not None else "0"
            many = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
            for optimizer in map(text, many):
                if not optimizer:
                    raise Untranslatable("amp.scale_loss gets optimizers that are not plain names")
                users.setdefault(optimizer, set()).add(key)
        if not users and self.source.calls_to("apex.amp.scale_loss"):
            raise Untranslatable("amp.scale_loss is called without an optimizer")
        merged: list[set[str]] = []
        for keys in users.values():
            joined = set(keys).union(*(group for group in merged if group & keys))
            merged = [group for group in merged if not group & keys] + [joined]
        for group in merged:
            if len(group) > 1 and any(number(ast.parse(key, mode="eval").body) is None for key in group):
                raise Untranslatable("one optimizer gets losses under loss_ids that are computed")
            self.loss_scaler.update(dict.fromkeys(group, self._scaler(min(group))))
        self.scaler_of = {optimizer: self.loss_scaler[min(keys)] for optimizer, keys in users.items()}
        for optimizer in set(self.scaler_of) - set(self.optimizers):
            if len(self.optimizers) == 1 and not self.prefix:
                raise Untranslatable(f"{optimizer} in amp.scale_loss is not {self.optimizers[0]} of amp.initialize")

    def _scaler(self, key: str) -> str:
        return f"{self.scaler}[{key}]" if self.many else self.scaler

    def autocast(self) -> str:
        """The context manager in source text."""
        enabled = f", enabled={self.switch}" if self.switched else ""
        return f"torch.autocast(device_type={self.device}, dtype={self.dtype}{enabled})"
