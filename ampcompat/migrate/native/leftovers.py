"""Last steps: mark the apex calls that remain, and drop the imports that nothing needs any more."""

from __future__ import annotations

import ast
import re

import libcst as cst

from ampcompat._extensions import EXTENSIONS
from ampcompat.check.bindings import Bindings
from ampcompat.check.source import parse
from ampcompat.check.symbols import MODULES, verdict
from ampcompat.migrate.marks import code_of, marked
from ampcompat.migrate.native.patterns import header, holds_statements, symbol, uses

TRANSLATED = {
    f"apex.amp.{name}"
    for name in ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "disable_casts")
}
REPLACEMENTS = {
    "apex.parallel.DistributedDataParallel": "these arguments have no counterpart in torch's DistributedDataParallel",
    "apex.parallel.convert_syncbn_model": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "apex.parallel.SyncBatchNorm": "use torch.nn.SyncBatchNorm",
    "apex.normalization.FusedLayerNorm": "use torch.nn.LayerNorm",
    "apex.optimizers.FusedLAMB": "torch has no LAMB; keep this one of ampcompat, or take another optimizer",
    "apex.optimizers.FusedNovoGrad": "torch has no NovoGrad; keep this one of ampcompat, or take another optimizer",
    "apex.normalization.FusedRMSNorm": "use torch.nn.RMSNorm",
    "apex.optimizers.FusedAdam": "use torch.optim.AdamW(fused=True), or Adam for adam_w_mode=False",
    "apex.optimizers.FusedSGD": "use torch.optim.SGD(fused=True)",
    "apex.amp._amp_state.loss_scalers": "use get_scale() of the scaler",
    "apex.amp.state_dict": "GradScaler's has other keys; use get_scale()",
    "apex.amp.float_function": "use torch.autocast(..., enabled=False) inside the function",
    "apex.amp.register_float_function": "use torch.autocast(..., enabled=False) around the calls of the function",
    "apex.amp.half_function": "autocast decides by operation; cast the arguments by hand",
    "apex.amp.register_half_function": "autocast decides by operation; cast the arguments by hand",
    "apex.amp.bfloat16_function": "autocast decides by operation; cast the arguments by hand",
    "apex.amp.register_bfloat16_function": "autocast decides by operation; cast the arguments by hand",
}


def _advice(name: str) -> str:
    if name in MODULES:
        return f"{name}: the module itself is used here; torch.amp is always there"
    note = verdict(name).note if verdict(name).verdict == "unsupported" else "no counterpart in torch.amp"
    return f"{name}: {REPLACEMENTS.get(name, note)}"


def names_used(code: str) -> set[str]:
    """The names that a text reads: ``amp = None`` needs no import."""
    return {n.id for n in ast.walk(parse(code)) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}


def apex_uses(names: set[str], bindings: Bindings) -> set[str]:
    """Those of ``names`` by which a text mentions apex outside its imports."""
    return {name for name in names if name in bindings.names or any(k.startswith(name + ".") for k in bindings.names)}


class Leftovers(cst.CSTTransformer):
    """Puts a TODO above each statement that still mentions apex."""

    def __init__(self, bindings: Bindings, names: set[str], reason: str | None) -> None:
        self.bindings, self.reason = bindings, reason
        self.mention = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")

    def on_visit(self, node: cst.CSTNode) -> bool:
        return holds_statements(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        new = super().on_leave(original_node, updated_node)
        if not isinstance(new, cst.BaseStatement):
            return new
        first = header(new)
        if not self.mention.search(code_of(first)):
            return new
        for name in dict.fromkeys(uses(first, self.bindings)):
            translatable = name in TRANSLATED and self.reason is not None
            new = marked(new, f"{name}: {self.reason}" if translatable else _advice(name))
        return new


def drop_imports(module: cst.Module, bindings: Bindings, used: set[str]) -> cst.Module:
    """Remove imports of apex whose names are not ``used`` any more."""
    return module.visit(_Drop(bindings, used))


class _Drop(cst.CSTTransformer):
    def __init__(self, bindings: Bindings, used: set[str]) -> None:
        self.bindings, self.used = bindings, used

    def on_visit(self, node: cst.CSTNode) -> bool:
        return holds_statements(node)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if len(updated_node.body) != 1:
            return updated_node
        (part,) = updated_node.body
        if not isinstance(part, cst.Import | cst.ImportFrom) or isinstance(part.names, cst.ImportStar):
            return updated_node
        kept = [alias for alias in part.names if not self._dead(part, alias)]
        if len(kept) == len(part.names):
            return updated_node
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated_node.with_changes(body=[part.with_changes(names=kept)])
        return cst.RemoveFromParent()

    def _dead(self, part: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> bool:
        bound = alias.asname.name if alias.asname is not None else alias.name
        name = code_of(bound)
        if isinstance(part, cst.Import) and alias.asname is None:
            name = name.partition(".")[0]
        origin = code_of(alias.name) if isinstance(part, cst.Import) else code_of(part.module) if part.module else ""
        ours = origin.partition(".")[0] in ("apex", "ampcompat", *EXTENSIONS) and not getattr(part, "relative", ())
        return ours and name not in self.used and symbol(cst.Name(name), self.bindings) is not None

    def leave_Try(
        self, original_node: cst.Try, updated_node: cst.Try
    ) -> cst.Try | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        """Without its import a ``try`` has nothing that could fail: what it said of a missing apex goes."""
        old, new = original_node.body.body, updated_node.body.body
        empty = len(new) == 1 and code_of(new[0]).strip() == "pass" and code_of(old[0]).strip() != "pass"
        if not empty or updated_node.finalbody is not None:
            return updated_node
        rest = updated_node.orelse.body.body if updated_node.orelse is not None else []
        kept = [part for part in rest if isinstance(part, cst.BaseStatement)]
        return cst.FlattenSentinel(kept) if kept else cst.RemoveFromParent()

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        if original_node.body and not updated_node.body:
            return updated_node.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])])
        return updated_node
