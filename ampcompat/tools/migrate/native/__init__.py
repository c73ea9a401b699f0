"""``--to native``: calls of apex become plain ``torch.amp``.

The forward of a model is made to run under autocast where ``amp.initialize`` stands, by a helper that is pasted into
the file; all that follows from it needs no change. What analysis remains is the order of the scaler's calls.

| question | modules |
|---|---|
| What does a file consist of, and what do its names mean? | ``nodes``, ``scopes``, ``file``, ``flows``, ``facts`` |
| Which tests for apex are answered, and which branches are one? | ``probes``, ``merge`` |
| In which order are losses scaled and steps made? | ``gradients``, ``phases``, ``optimizers``, ``control``, ``paths`` |
| What is written instead? | ``initialize``, ``home``, ``helper``, ``loop``, ``amp_calls``, ``replaced`` |
| What goes, and what is left to the reader? | ``imports``, ``leftovers`` |
| How is the tree changed? | ``edits`` |
"""

from __future__ import annotations

import re
from dataclasses import replace

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, ImportItem

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.split_lines import lines_of
from ampcompat.tools.migrate.caller import NAME
from ampcompat.tools.migrate.native.amp_calls import replace_casts, replace_state, state_uses
from ampcompat.tools.migrate.native.edits import SCALER, Edits
from ampcompat.tools.migrate.native.facts import MASTER_PARAMS, SCALE_LOSS, Facts
from ampcompat.tools.migrate.native.file import File, Function
from ampcompat.tools.migrate.native.home import Home, caller_of, has_helper, helper_names
from ampcompat.tools.migrate.native.imports import drop_imports, with_torch
from ampcompat.tools.migrate.native.initialize import HELPER, SWITCHED_OFF, replace_initialize
from ampcompat.tools.migrate.native.leftovers import mark_mentions, mark_objects
from ampcompat.tools.migrate.native.loop import (
    insert_unscale,
    replace_backward,
    replace_losses,
    replace_master_params,
    replace_steps,
    scale_thresholds,
    scaled_steps,
)
from ampcompat.tools.migrate.native.merge import merge_branches
from ampcompat.tools.migrate.native.paths import Walk
from ampcompat.tools.migrate.native.probes import answer_probes
from ampcompat.tools.migrate.native.replaced import replace_classes
from ampcompat.tools.migrate.result import ALONE, Result, Tree
from ampcompat.tools.migrate.text import INSTALL_APEX

NO_LOOP = (
    "this file has no amp.scale_loss: hand {scaler} to the loop that trains, and write there "
    "{scaler}.scale(loss).backward(), {scaler}.step(optimizer), {scaler}.update()"
)
NO_STEP = (
    f"no step of this optimizer is seen in this file: make it {SCALER}.step(optimizer), then {SCALER}.update(), "
    "wherever it is"
)
PLAIN_STEP = (
    f"another file scales losses: if their gradients are stepped here, write {SCALER}.step(optimizer), then "
    f"{SCALER}.update()"
)
#: What a file cannot do without a scaler.
NEEDED = (*SCALE_LOSS, *MASTER_PARAMS, "apex.amp.state_dict", "apex.amp.load_state_dict")
NAMES_APEX = re.compile(rf"\b({'|'.join(('apex', *EXTENSIONS))})\b|(import|from) ampcompat\b")


def rewrite_native(code: str, tree: Tree = ALONE) -> Result:
    """Rewrite one source.

    Args:
        code: The source.
        tree: What the other files of a tree say.
    """
    facts = Facts(File(cst.parse_module(code)))
    if not facts.initialized:
        return _without_initialize(facts, tree)
    facts = _simplified(facts)
    edits = Edits()
    walk = Walk(facts)
    home = Home(facts, _functions_that_use_it(facts, walk))
    makes_optimizers = any(made.optimizers for made in facts.initialized)
    used = bool(home.uses) or (makes_optimizers and not tree.trains_elsewhere)
    replace_initialize(facts, home, edits, used)
    _translate(facts, walk, home, edits)
    if not facts.scaled and not walk.steps and not tree.trains_elsewhere:
        for made in facts.initialized:
            if made.optimizers is not None:
                edits.mark(facts.file.statement(made.call), NO_LOOP.format(scaler=SCALER))
    if tree.trains_elsewhere:
        for step in walk.steps.values():
            if step.unseen and not step.scaled:
                edits.mark(facts.file.statement(step.call), PLAIN_STEP)
    new = edits.apply(facts.file)
    result = _finished(drop_imports(new), facts, home)
    for text in facts.file.of_type(cst.SimpleString):
        if INSTALL_APEX.search(text.value) and text.value in result.code:
            edits.note(f"{text.value} tells users to install apex, which nothing needs any more")
    result.notes = edits.notes
    result.shares = tree.trains_elsewhere
    result.makes = next(n for n, text in enumerate(lines_of(code), 1) if "initialize" in text)
    result.optimizers = facts.optimizer_names()
    return result


def _simplified(facts: Facts) -> Facts:
    """The facts of the file with tests for apex answered, and branches merged that differ by amp alone."""
    for prepare in (answer_probes, merge_branches):
        prepared = prepare(facts)
        if prepared is not None:
            facts = Facts(File(prepared))
    return facts


def _without_initialize(facts: Facts, tree: Tree) -> Result:
    """A file whose scaler another file makes: it is that of the helper's module, or its uses are marked."""
    borrowing = _borrowing(facts, tree) if tree.helper else None
    if borrowing is not None:
        return borrowing
    result = Result.of(_marked_without_initialize(facts, tree.made_in))
    result.needs = any(facts.symbol(call.func) in NEEDED for call in facts.file.of_type(cst.Call))
    return result


def _borrowing(old: Facts, tree: Tree) -> Result | None:
    """The file with the scaler of the helper's module; None where it does not step what it scales."""
    facts = _simplified(old)
    walk = Walk(facts)
    reads_gradients = any(facts.symbol(call.func) in MASTER_PARAMS for call in facts.file.of_type(cst.Call))
    if walk.unstepped() or (reads_gradients and not facts.scaled):
        return None
    edits = Edits()
    home = Home(facts, _functions_that_use_it(facts, walk))
    _translate(facts, walk, home, edits)
    module = with_torch(_marked_where_needed(drop_imports(edits.apply(facts.file))))
    module = _importing_helper(module, tree.helper, helper_names(facts.file)[NAME])
    result = Result.of(module.code.replace(SCALER, home.name))
    result.notes = edits.notes
    result.shares = True
    return result


def _importing_helper(module: cst.Module, helper: str, name: str) -> cst.Module:
    """The module with ``import mixed_precision``, or ``from . import mixed_precision``, under a name."""
    alias = name if name != NAME else None
    item = ImportItem("", NAME, alias, relative=1) if helper.startswith(".") else ImportItem(helper, alias=alias)
    return AddImportsVisitor(CodemodContext(), [item]).transform_module(module)


def _finished(module: cst.Module, facts: Facts, home: Home) -> Result:
    """The result: with marks above what still names apex, with the names that were chosen, and with the helper."""
    module = _marked_where_needed(module)
    code = module.code
    names = helper_names(facts.file)
    if HELPER not in code or has_helper(facts.file):
        return Result.of(_named(with_torch(module).code, names, home.name))
    shared = ""
    if home.kind == "global":
        shared = f"{home.name} = {SWITCHED_OFF}  # until {names[HELPER]}() is called"
    caller = caller_of(module, code, facts.file, names, shared)
    above = _named(caller.above, names, home.name)
    below = _named(caller.below, names, home.name)
    caller = replace(caller, above=above, below=below)
    result = Result.of(caller.with_helper())
    result.caller = caller
    return result


def _functions_that_use_it(facts: Facts, walk: Walk) -> set[Function | None]:
    """The functions whose code names the scaler after the translation."""
    nodes: list[cst.CSTNode] = [*facts.scaled, *state_uses(facts), *walk.scaled_backward]
    nodes += [step.call for step in scaled_steps(walk)]
    nodes += [place.statement for place in walk.unscales.values()]
    nodes += walk.scaled_clips
    return {facts.file.function(node) for node in nodes}


def _translate(facts: Facts, walk: Walk, home: Home, edits: Edits) -> None:
    replace_losses(facts, home, edits)
    replace_backward(facts, walk, home, edits)
    replace_steps(facts, walk, home, edits)
    insert_unscale(walk, home, edits)
    scale_thresholds(walk, home, edits)
    replace_master_params(facts, edits)
    replace_state(facts, home, edits)
    replace_casts(facts, edits)
    replace_classes(facts, edits)
    for statement, message in sorted(walk.problems, key=lambda problem: facts.file.order(problem[0])):
        edits.mark(statement, message)
    for node in walk.unstepped():
        edits.mark(facts.file.statement(node), NO_STEP)
    mark_objects(facts, walk, SCALER, edits)


def _named(code: str, names: dict[str, str], scaler: str) -> str:
    """A source with the names that were chosen for the helper and the scaler."""
    code = code.replace(SCALER, scaler)
    return code if names[HELPER] == HELPER else code.replace(f"{HELPER}(", f"{names[HELPER]}(")


def _marked_where_needed(module: cst.Module) -> cst.Module:
    """The module with marks above what still names apex."""
    if not NAMES_APEX.search(module.code) or not File(module).imported_names():
        return module
    marks = Edits()
    file = File(cst.parse_module(module.code))
    mark_mentions(file, marks, {})
    return marks.apply(file)


def _marked_without_initialize(facts: Facts, made_in: str) -> str:
    """A file whose scaler another file makes, with marks that say what to write."""
    edits = Edits()
    where = f" (it is in {made_in})" if made_in else ""
    missing = f"amp.initialize is not called in this file{where}: hand its scaler to this function"
    reasons = dict.fromkeys(SCALE_LOSS, f"{missing}, and write scaler.scale(loss).backward() for the block")
    reasons.update(
        dict.fromkeys(
            MASTER_PARAMS,
            f"{missing}, call scaler.unscale_(optimizer) first, and use "
            '[p for group in optimizer.param_groups for p in group["params"]]',
        )
    )
    reasons["apex.amp.state_dict"] = f"{missing}, and write scaler.state_dict()"
    reasons["apex.amp.load_state_dict"] = f"{missing}, and write scaler.load_state_dict(...)"
    replace_classes(facts, edits)
    if facts.scaled:
        for node in facts.file.of_type(cst.Attribute):
            parent = facts.file.parents[node]
            called = isinstance(parent, cst.Call) and parent.func is node
            if node.attr.value == "step" and called and facts.is_optimizer(node.value):
                edits.mark(facts.file.statement(node), f"{missing}, and write scaler.step(optimizer); scaler.update()")
    new = drop_imports(edits.apply(facts.file))
    marks = Edits()
    file = File(cst.parse_module(new.code))
    mark_mentions(file, marks, reasons)
    return with_torch(marks.apply(file)).code
