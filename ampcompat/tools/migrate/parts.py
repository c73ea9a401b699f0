"""The parts of ``native_amp.py`` that a script may do without, and what in a script needs them.

In the file, a part stands between ``# <name>`` and ``# </name>``, often in several places; a single line of a part ends
with ``# <name>``. What two parts share has both names. A copy has the parts that the code around it needs. The search
is in texts, not in parsed code: a word in a string or a comment keeps a part in vain, which does no harm.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from ampcompat import __version__

NAME = "native_amp"
WHOLE = Path(__file__).with_name(f"{NAME}.py")

#: What in a text needs a part.
NEEDS = {
    name: re.compile(pattern, re.MULTILINE | re.IGNORECASE)
    for name, pattern in {
        # That of amp, under whatever name; models and optimizers have a state_dict of their own.
        "checkpoints": r"amp\w*\.(load_)?state_dict|apex\S*state_dict|import [^\n]*state_dict|"
        r"['\"](load_)?state_dict['\"]|\bamp as (?!\w*amp)\w|getattr\(\w*amp",
        # A step that is given anything, unless it is a scheduler's.
        "closures": r"closure|LBFGS|^(?!.*sched).*\.step\([^)\n]",
        "data_parallel": r"\bDataParallel\b|\bdata_parallel\b|\breplicate\b",
        # By its name, or in arguments that the source does not spell out.
        "delayed_blocks": r"delay_unscale|no_sync|scale_loss\((.*[(,])?\s*\*|scale_loss\(([^,\n]*,){4}|scale_loss\($",
        # Functions of autograd, whose backward may meet two dtypes.
        "explanations": r"\bFunction\b",
        # Who reads more of a forward than its signature.
        "forward_attributes": r"__code__|\binspect\b|\.forward\b(?! *\()|['\"]forward['\"]",
        "functions": r"half_function|float_function|disable_casts",
        "fused_checkpoints": r"FusedAdam|FusedAdagrad|fused_ada",
        "retained_gradients": r"retain_grad",
        "star_imports": r"import \*",
        # Losses that may come from another method of a model, or from a part of it.
        "unused_forwards": r"^\s+(async )?def (?!forward\b|_)\w+\(\s*self|"
        r"(?<!\bF)(?<!\bnn)(?<!\bself)(?<!functional)\.(?!scale_loss|loss_scale)"
        r"\w*(loss|encode|decode|sample|features|backbone|trunk|head)\w*\(",
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
        found |= {name for name in PARTS - found if NEEDS[name].search(text)}
    return frozenset(found)


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
    origin = WRITTEN.search(copy)
    if origin is None:
        return None
    parts = PARTS & set(re.split(r",\s", origin[1]))
    return parts if written(parts) == copy else None
