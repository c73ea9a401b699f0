"""Gather what the translation must know of a file before it changes anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from ampcompat.check.bindings import dotted
from ampcompat.check.source import SCOPES, Source, argument, number, text
from ampcompat.migrate.casts import Casts, in_autocast
from ampcompat.migrate.objects import FUNCTIONS, Label, Labels, Objects
from ampcompat.migrate.proof.subject import Managed

HALF = "torch.float16"
BRACKETS = re.compile(r"[()\[\]]")


class Untranslatable(Exception):
    """The file uses amp in a way that has no safe mechanical translation; the message says which."""


class Facts:
    """One ``initialize`` call and everything that refers to it.

    Attributes:
        models: Source text of each model, e.g. ``self.model``.
        optimizers: Source text of each optimizer.
        scaler_of: Source text of the scaler that steps an optimizer, for each name that the optimizer goes by.
        labels_of: Which optimizers a name may mean.
        dtype: Source text of the autocast dtype.
        enabled: Source text of the condition under which amp is on, None for always.
        branch: The outermost ``if`` around ``initialize``, None when it is unconditional.
        step_lines: Lines on which an optimizer of amp steps.
        scaled: Which optimizers each ``scale_loss`` block is for, in the order of the file.
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
        self._branch()
        roots = [(Label("model", i), name) for i, name in enumerate(self.models)]
        roots += [(Label("optimizer", i), name) for i, name in enumerate(self.optimizers)]
        self.scope = source.scope(self.call)
        self.objects = Objects(source, [(self.scope, name, label) for label, name in roots])
        self._containers()
        self._blocks()
        # At O2 apex casts what the given models take and return, at O1 every operation of the process.
        self.casts = Casts(source, self.objects, everywhere=self.level != "O2")
        self.settle({})

    def settle(self, regions: Mapping[int, tuple[int, int]]) -> None:
        """Choose names for the scaler and the device; forwards on the lines of ``regions`` have theirs."""
        self._place(regions)
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
        for name in (*self.models, *self.optimizers):
            if dotted(ast.parse(name, mode="eval").body) is None:
                raise Untranslatable(f"amp.initialize gets or binds {name}, which is no plain name")
        wanted = ", ".join(ast.unparse(v) for v in given if v is not None)
        self.rebinds = None
        if target is not None and BRACKETS.sub("", ast.unparse(target)) != BRACKETS.sub("", wanted):
            self.rebinds = f"{ast.unparse(target)} = {wanted}"

    def _level(self) -> None:
        level, enabled = self.option(3, "opt_level"), self.option(2, "enabled")
        self.dtype, self.notes, self.enabled = HALF, list[str](), None
        self.static, self.level = False, ""
        if level is None or isinstance(level, ast.Constant):
            name = self.level = "O1" if level is None else str(level.value)
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

    def _branch(self) -> None:
        """The ``if`` under which amp is set up."""
        source = self.source
        branches = []
        for parent in source.ancestors(self.statement):
            if isinstance(parent, SCOPES):
                break
            if isinstance(parent, ast.For | ast.While | ast.Try):
                raise Untranslatable("amp.initialize is called in a loop or a try")
            branches += [parent] if isinstance(parent, ast.If) else []
        self.branch = branches[-1] if branches else None
        if self.branch is not None and not isinstance(source.parents.get(self.branch), (*SCOPES, ast.Module)):
            raise Untranslatable("amp.initialize is called under an `if` inside another block")

    def _place(self, regions: Mapping[int, tuple[int, int]]) -> None:
        """Choose the home of scaler and device: beside ``self.optimizer``, in the function, or as globals."""
        source = self.source
        scope = source.scope(self.call)
        uses: list[ast.AST] = [c for c in source.calls if (source.apex(c.func) or "").startswith("apex.amp.")]
        uses += self._steps()
        for part in self.casts.needs:
            covered = any(start <= part.lineno <= end for start, (_, end) in regions.items())
            uses += [] if covered or in_autocast(source, part) else [part]
        on_self = all(name.startswith("self.") for name in (*self.models[:1], *self.optimizers))
        homes = {self.objects.class_of(source.scope(use)) for use in uses}
        on_self = on_self and len(homes) == 1 and None not in homes
        self.prefix = "self." if on_self else ""
        self.is_global = not on_self and scope is not source.tree and any(source.scope(u) is not scope for u in uses)
        taken = {n.id for n in source.nodes if isinstance(n, ast.Name)} | {
            n.attr for n in source.nodes if isinstance(n, ast.Attribute)
        }
        self.many = self.option(10, "num_losses") is not None
        name = "scalers" if self.many else "scaler"
        self.scaler = self.prefix + (f"amp_{name}" if name in taken else name)
        self.device, self.switch = f"{self.prefix}amp_device", f"{self.prefix}amp_enabled"
        self.switched = self.enabled is not None or self.branch is not None

    def _steps(self) -> list[ast.AST]:
        """Steps of the optimizers, where the scaler will be named."""
        found: list[ast.AST] = []
        self.step_lines: set[int] = set()
        self.steps: list[tuple[ast.Call, Labels]] = []
        for call in self.source.calls:
            func = call.func
            if isinstance(func, ast.Attribute) and func.attr == "step" and self.objects.optimizers(func.value):
                found.append(call)
                self.step_lines.add(call.lineno)
                self.steps.append((call, self.objects.optimizers(func.value)))
        return found

    def _containers(self) -> None:
        """Which names hold several objects: the scaler steps one optimizer at a time."""
        self.containers: set[str] = set()
        displayed: set[str] = set()
        wanted = {*self.models, *self.optimizers}
        for node, target, value in self.objects.assignments:
            path = text(target)
            if path in wanted and isinstance(value, ast.List | ast.Tuple | ast.ListComp):
                displayed.add(path)
            if path in wanted and isinstance(value, ast.Dict | ast.DictComp):
                raise Untranslatable(f"{path}, which amp.initialize gets, is a dict")
            if isinstance(node, ast.For | ast.comprehension):
                walked = [node.iter]
                if isinstance(node.iter, ast.Call) and text(node.iter.func) in ("zip", "enumerate", "reversed"):
                    walked += node.iter.args
                self.containers |= set(map(text, walked)) & wanted
        #: Known by a loop alone: a Sequential is walked over, too, and its first layer may have no parameters.
        self.walked = self.containers - displayed
        self.containers |= displayed

    def names_in(self, scope: ast.AST) -> dict[Label, str]:
        """For each optimizer a name by which ``scope`` can call it, that of ``initialize`` first."""
        names: dict[Label, str] = {}
        for path, labels in self.labels_of.items():
            owner = self.objects._owner(scope, path)
            owners = list(self.objects.bases(owner)) if isinstance(owner, ast.ClassDef) else [owner]
            if len(labels) == 1 and any(labels & self.objects.known.get((one, path), frozenset()) for one in owners):
                for label in labels:
                    if label not in names or path == self.optimizers[label.index]:
                        names[label] = path
        return names

    def same(self, one: str, other: str) -> bool:
        """Whether two names may mean the same optimizer."""
        return one == other or bool(self.labels_of.get(one, frozenset()) & self.labels_of.get(other, frozenset()))

    @property
    def groups(self) -> int:
        """The number of optimizers."""
        return len({label for labels in self.labels_of.values() for label in labels})

    def _blocks(self) -> None:
        """The ``scale_loss`` blocks, each with its optimizers and the key of its loss."""
        source = self.source
        self.calls: list[ast.Call] = []
        self.scaled: list[Labels] = []
        self.keys: list[str] = []
        calls = source.calls_to("apex.amp.scale_loss", "apex.amp.handle.scale_loss")
        for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset)):
            item = source.parents.get(call)
            block = source.parents.get(item) if item is not None else None
            if (
                not isinstance(item, ast.withitem)
                or not (isinstance(block, ast.With) and len(block.items) == 1)
                or len(call.args) < 2
                or any(k.arg is None for k in call.keywords)
            ):
                raise Untranslatable(
                    "amp.scale_loss is not used as `with amp.scale_loss(loss, optimizer) as scaled_loss`"
                )
            if item.optional_vars is not None and not isinstance(item.optional_vars, ast.Name):
                raise Untranslatable("amp.scale_loss yields into something else than a plain name")
            labels = self.objects.optimizers(call.args[1])
            if not labels:
                given = ast.unparse(call.args[1])
                raise Untranslatable(
                    f"amp.scale_loss gets {given}, which this file does not show to come from amp.initialize"
                )
            loss_id = argument(call, 2, "loss_id")
            self.calls.append(call)
            self.scaled.append(labels)
            self.keys.append(ast.unparse(loss_id) if loss_id is not None else "0")
        if self.optimizers and not calls:
            raise Untranslatable("amp.scale_loss is not called in this file: the loop that trains is in another one")

    def _scalers(self) -> None:
        """One scaler for an optimizer: losses that share one share a scale, since their gradients are added."""
        self.loss_scaler: dict[str, str] = {}
        users: dict[Label, set[str]] = {}
        for call, labels, key in zip(self.calls, self.scaled, self.keys, strict=True):
            if not _literal(key):
                self._computed(call, labels, key, users)
                continue
            for label in labels:
                users.setdefault(label, set()).add(key)
        merged: list[set[str]] = []
        for keys in users.values():
            joined = set(keys).union(*(group for group in merged if group & keys))
            merged = [group for group in merged if not group & keys] + [joined]
        for group in merged:
            if len(group) > 1 and not all(map(_literal, group)):
                raise Untranslatable("one optimizer gets losses under loss_ids that are computed")
            self.loss_scaler.update(dict.fromkeys(group, self._scaler(min(group))))
        for key in self.keys:
            self.loss_scaler.setdefault(key, self._scaler(key))
        by_label = {label: self.loss_scaler[min(keys)] for label, keys in users.items()}
        self.scaler_of: dict[str, str] = {}
        self.labels_of: dict[str, Labels] = {}
        several: set[str] = set()
        for label in by_label:
            for path in self.objects.paths(label):
                if self.scaler_of.setdefault(path, by_label[label]) != by_label[label]:
                    several.add(path)
                self.labels_of[path] = self.labels_of.get(path, frozenset()) | {label}
        for path in several:
            del self.scaler_of[path], self.labels_of[path]
        # `opts["g"].step()`, `self.gan.opt.step()`: no path of its own, but known for what it may be.
        for call, labels in self.steps:
            path, scalers = ast.unparse(call.func.value), {by_label.get(label) for label in labels}  # type: ignore[attr-defined]
            if len(scalers) > 1:
                raise Untranslatable(f"{path} steps optimizers that have scalers of their own")
            scaler = scalers.pop()
            if path not in self.scaler_of and scaler is not None:
                self.scaler_of[path], self.labels_of[path] = scaler, labels
        for name in self.optimizers:
            label = Label("optimizer", self.optimizers.index(name))
            if label not in by_label:
                raise Untranslatable(f"no amp.scale_loss of this file is for {name}")

    def _computed(self, call: ast.Call, labels: Labels, key: str, users: dict[Label, set[str]]) -> None:
        """A ``loss_id`` that is computed: handed to the function with its optimizer, or used where that steps."""
        scope = self.source.scope(call)
        optimizer = text(call.args[1])
        for made in self.source.calls:
            if scope not in self.objects.called(made) or not isinstance(scope, FUNCTIONS):
                continue
            given = dict(self.objects.bound(made, scope))
            if key in given and optimizer in given and _literal(ast.unparse(given[key])):
                for label in self.objects.optimizers(given[optimizer]):
                    users.setdefault(label, set()).add(ast.unparse(given[key]))
        missing = [label for label in labels if len(users.get(label, ())) != 1]
        here = all(self.source.scope(step) is scope for step, stepped in self.steps if stepped & labels)
        if missing and not (here and len(missing) == len(labels)):
            raise Untranslatable("the loss_id is computed, and the optimizer steps where it is not known")
        for label in missing:
            users.setdefault(label, set()).add(key)

    def _scaler(self, key: str) -> str:
        return f"{self.scaler}[{key}]" if self.many else self.scaler

    def managed(self) -> Managed:
        """Describe what is under amp now, for the proof."""
        by_index = {label.index: self.scaler_of[path] for path, labels in self.labels_of.items() for label in labels}
        inserted = (self.scaler, self.device, self.switch)
        models, optimizers = tuple(self.models), tuple(self.optimizers)
        everywhere = self.level != "O2"
        names = tuple(ast.unparse(call.args[1]) for call in self.calls)
        return Managed(models, optimizers, self.scaler, inserted, tuple(self.scaled), names, by_index, everywhere)

    def autocast(self) -> str:
        """The context manager in source text."""
        enabled = f", enabled={self.switch}" if self.switched else ""
        return f"torch.autocast(device_type={self.device}, dtype={self.dtype}{enabled})"


def _literal(key: str) -> bool:
    return number(ast.parse(key, mode="eval").body) is not None
