"""The parts of ``native_amp.py`` that a script may do without, and what in a script needs them.

In the file, a part stands between ``# <name>`` and ``# </name>``, often in several places; a single line of a part ends
with ``# <name>``. What two parts share has both names. A copy has the parts that the code around it needs: patterns
are searched in the code without its comments and docstrings.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from ampcompat import __version__
from ampcompat.tools.check.source import parse

NAME = "native_amp"
WHOLE = Path(__file__).with_name(f"{NAME}.py")

#: What in a text needs a part. Repeats have bounds: a hostile file must not take quadratic time.
NEEDS = {
    name: re.compile(pattern, re.MULTILINE | re.IGNORECASE)
    for name, pattern in {
        # That of amp, by itself or by a name of the module; models and optimizers have a state_dict of their own.
        # Amp may have another name, or be handed on.
        "checkpoints": r"(?<![.\w])(load_)?state_dict\b|amp\w{0,40}\.(load_)?state_dict|\bamp as (?!\w{0,40}amp)\w|"
        r"([=(:\[{]|\b(return|or|and|else)\b)\s{0,9}(apex\.)?amp\s{0,9}($|[,)\]}#])|,\s{0,9}(apex\.)?amp\s{0,9}[)\]}]",
        # A step that is given anything, unless it is a scheduler's.
        "closures": r"closure|LBFGS|(?<!scheduler)(?<!sched)\.step\(([^)\n]|$)",
        "data_parallel": r"\bDataParallel\b|\bdata_parallel\b|\breplicate\b",
        # By its name, or in arguments that the source does not spell out.
        "delayed_blocks": r"delay_unscale|delay_overflow_check|no_sync|"
        r"scale_loss\(([^)\n]{0,99}$|(.{0,200}[(,])?\s{0,9}\*|([^,\n]{0,99},){4})",
        # Functions of autograd, whose backward may meet two dtypes.
        "explanations": r"\bFunction\b",
        # Who reads more of a forward than its signature.
        "forward_attributes": r"__code__|\binspect\b|\.forward\b(?! ?\()|['\"]forward['\"]",
        "functions": r"half_function|float_function|disable_casts",
        "fused_checkpoints": r"FusedAdam|FusedAdagrad|fused_ada",
        "retained_gradients": r"retain_grad",
        # Losses that may come from another method of a model, or from a part of it.
        "unused_forwards": r"^[ \t]{1,40}(async )?def (?!forward\b|_)\w{1,60}\(\s{0,9}self|"
        r"(?<!\bF)(?<!\bnn)(?<!\bself)(?<!functional)\.(?!scale_loss|loss_scale)"
        r"\w{0,40}(loss|encode|decode|sample|features|backbone|trunk|head)\w{0,40}\(",
    }.items()
}
PARTS = frozenset(NEEDS)

MARKER = re.compile(r"(?P<line>.*?) *# <(?P<end>/?)(?P<parts>\w+(, \w+)*)>")
ORIGIN = "Written by ampcompat with all of its parts."
WRITTEN = re.compile(r"Written by ampcompat \S+, with the optional parts that the code around it uses: ([\w,\s]+)\.")


def needed_by(texts: Iterable[str | None]) -> frozenset[str]:
    """The parts that sources need; all of them where a source cannot be read, which is None."""
    found: set[str] = set()
    for text in texts:
        if text is None:
            return PARTS
        named = _needed_by(text) - found
        if named:  # else the text need not be parsed
            found |= named & _needed_by(_searchable(text))
    return frozenset(found)


def _needed_by(text: str) -> frozenset[str]:
    return frozenset(name for name, pattern in NEEDS.items() if pattern.search(text))


def _searchable(text: str) -> str:
    """The code without comments and docstrings, each statement on one line; as it is where it cannot be parsed.

    Methods of classes without a base, which are no models, have a private name.
    """
    try:
        tree = parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)
            elif isinstance(node, ast.ClassDef) and all(ast.unparse(base) == "object" for base in node.bases):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        method.name = f"_{method.name}"
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def written(parts: Iterable[str]) -> str:
    """The file with some of its parts; it names them, and the version that wrote it."""
    wanted = sorted(parts)
    lines: list[str] = []
    is_kept = True
    for line in WHOLE.read_text("utf-8").splitlines():
        marker = MARKER.fullmatch(line)
        if marker is None:
            lines += [line] if is_kept else []
            continue
        is_wanted = any(part in wanted for part in marker["parts"].split(", "))
        if not marker["line"]:
            is_kept = is_wanted or marker["end"] == "/"
        elif is_kept and is_wanted:
            lines.append(marker["line"])
    names = ", ".join(wanted) or "none"
    origin = f"Written by ampcompat {__version__}, with the optional parts that the code around it uses: {names}."
    return "\n".join(lines).rstrip().replace(ORIGIN, textwrap.fill(origin, 120)) + "\n"


def parts_of(copy: str) -> frozenset[str] | None:
    """The parts of a copy; None for one that was changed, or that another version wrote."""
    parts = parts_named_in(copy)
    return parts if parts is not None and written(parts) == copy else None


def parts_named_in(copy: str) -> frozenset[str] | None:
    """The parts that a copy says it has, changed or not; None where it does not say."""
    origin = WRITTEN.search(copy)
    return None if origin is None else PARTS & set(re.split(r",\s", origin[1]))
