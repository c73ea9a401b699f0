"""Draws docs/images/rooms.svg, the rooms of ``ampcompat/amp`` and their imports: ``python docs/rooms.py``.

:data:`ROWS` is the one place that says which room may import which; ``tests/structure`` checks it against the imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
PICTURE: Final = ROOT / "docs" / "images" / "rooms.svg"

#: Rows of rooms, lowest first, each room with its place from left to right. A room imports rooms of lower rows only.
ROWS: Final[tuple[dict[str, float], ...]] = (
    {"_state": 2.0, "_torch": 3.4, "_types": 4.8},
    {"_log": 3.0},
    {"lists": 0.0, "trees": 1.0, "observers": 2.2, "masters": 3.4, "_amp_state": 4.8, "scaler": 6.0},
    {"_initialize": 1.4, "utils": 2.4, "properties": 4.4},
    {"refusals": 0.5},
    {"rules": 0.5},
    {"cpu_convolution": 1.1, "weights": 3.2, "ddp": 4.15, "nested": 5.1},
    {"autocast": 1.0},
    {"amp_model": 2.2},
    {"keep_fp32": 1.1, "wrap": 2.1, "session": 4.0},
    {"stash": 4.0, "misuse": 5.05},
    {"block": 4.5},
    {"optimizer": 3.8},
    {"handle": 4.2, "checkpoint": 6.0},
    {"compat": 0.0, "rnn_compat": 1.0, "frontend": 2.8, "amp": 4.0, "opt": 5.0, "__version__": 6.0},
    {"__init__": 3.6},
)
#: Rows that every room may import: drawn without arrows.
BASE: Final = 2
#: Rooms that hold names which legacy code imports, and little else.
THIN: Final = frozenset(
    ("__version__", "_amp_state", "_initialize", "compat", "handle", "opt", "rnn_compat", "utils", "wrap")
)
#: Of these, names alone: the facade imports them so that scripts find them, which takes no arrow.
NAMES: Final = frozenset(("__version__", "_initialize", "compat", "rnn_compat", "utils", "wrap"))
#: What the facade, ``amp/__init__.py``, may import from above, inside functions only.
FACADE_MAY_IMPORT: Final = frozenset(("explain", "report", "scale_log"))


class Import(NamedTuple):
    """One import of a module of ours by another, by full names."""

    source: str
    target: str
    lazy: bool


def modules() -> dict[str, Path]:
    """Every module of ampcompat by its full name."""
    found = {}
    for path in sorted((ROOT / "ampcompat").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def _targets(node: ast.AST, source: str, known: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = source if known[source].name == "__init__.py" else source.rpartition(".")[0]
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
        full = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in known else base for name in full]
    if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
        name = node.args[0]
        return [str(name.value)] if isinstance(name, ast.Constant) else []
    return []


def _imports_in(node: ast.AST, source: str, known: dict[str, Path], lazy: bool) -> Iterator[Import]:
    yield from (Import(source, to, lazy) for to in _targets(node, source, known) if to in known and to != source)
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)):
        lazy = True
    for child in children:
        yield from _imports_in(child, source, known, lazy)


def imports() -> list[Import]:
    """Every import between modules of ampcompat, those inside functions and conditions (``lazy``) included."""
    known = modules()
    found: list[Import] = []
    for name, path in known.items():
        found += _imports_in(ast.parse(path.read_text(encoding="utf-8")), name, known, lazy=False)
    return found


def room_of(module: str) -> str | None:
    """The room of :data:`ROWS` that ``module`` belongs to; None where it is above them, or the package itself."""
    parts = module.split(".")
    if parts[1:2] == ["amp"]:
        return parts[2] if len(parts) > 2 else "__init__"
    return parts[1] if parts[1:2] and parts[1] in {"_state", "_log", "_torch", "_types"} else None


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {name: set() for row in ROWS for name in row}
    for one in imports():
        source, target = room_of(one.source), room_of(one.target)
        if source is not None and target is not None and source != target:
            found.setdefault(source, set()).add(target)
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """``graph`` without the arrows that other arrows lead along already."""

    def reach(name: str) -> set[str]:
        return graph[name].union(*map(reach, graph[name]))

    return {name: targets - set().union(*map(reach, targets)) for name, targets in graph.items()}


# -- the picture -------------------------------------------------------------------------------------------------------
WIDTH, BOX, HEIGHT, STEP, TOP, COLUMNS = 1000, 128, 34, 66, 64, 7
STYLE: Final = """
text { font: 15px "DejaVu Sans", Verdana, Helvetica, sans-serif; text-anchor: middle; fill: #1b1f24 }
.note { font-size: 13px; fill: #57606a } .left { text-anchor: start }
rect { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.3 } .thin { fill: #fff; stroke-dasharray: 4 3 }
.base { fill: #f6f8fa; stroke: #57606a } .above { fill: #fff8c5; stroke: #9a6700 } .band { fill: #f6f8fa; stroke: none }
.page { fill: #fff; stroke: none }
path { fill: none; stroke: #57606a; stroke-width: 1.3 }
"""


def _center(name: str) -> tuple[float, float]:
    for index, row in enumerate(ROWS):
        if name in row:
            x = 14 + BOX / 2 + row[name] * (WIDTH - 28 - BOX) / (COLUMNS - 1)
            return x, TOP + HEIGHT / 2 + (len(ROWS) - 1 - index) * STEP
    raise KeyError(f"{name!r} has no place in ROWS of docs/rooms.py - give it one, above all that it imports.")


def _box(name: str, style: str) -> str:
    x, y = _center(name)
    rect = (
        f'<rect class="{style}" x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
    )
    return f'{rect}\n<text x="{x:.0f}" y="{y + 5:.0f}">{name}</text>'


def _arrow(source: str, target: str) -> str:
    (x, y), (to_x, to_y) = _center(source), _center(target)
    lean = max(-0.36, min(0.36, (to_x - x) / 500)) * BOX  # arrows to different rooms leave at different places
    x, y, to_x, to_y = x + lean, y + HEIGHT / 2, to_x - lean, to_y - HEIGHT / 2 - 3
    bend = min(60.0, (to_y - y) / 2)
    curve = f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path d="{curve}" marker-end="url(#head)"/>'


def picture() -> str:
    """The rooms as SVG, higher ones above, an arrow from each to those it imports; implied arrows are left out."""
    base = {name for row in ROWS[:BASE] for name in row}
    graph = reduced({name: targets - base - NAMES for name, targets in arrows().items()})
    height = TOP + (len(ROWS) - 1) * STEP + HEIGHT + 40
    band = TOP + (len(ROWS) - BASE) * STEP - 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        "<title>The rooms of ampcompat/amp and what they import</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" style="fill:#57606a;stroke:none"/></marker></defs>',
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<rect class="band" y="{band}" width="{WIDTH}" height="{height - band}"/>',
        f'<text class="note" x="{WIDTH / 2:.0f}" y="{height - 14}">every room may import these: arrows left out</text>',
        f'<rect class="above" x="14" y="8" width="{WIDTH - 28}" height="{HEIGHT}" rx="5"/>',
        f'<text x="{WIDTH / 2:.0f}" y="30">explain · report · parity · testing · cli · parallel</text>',
        *(_arrow(source, target) for source, targets in sorted(graph.items()) for target in sorted(targets)),
        f'<path d="M{WIDTH - 240} {8 + HEIGHT}v24" marker-end="url(#head)"/>',
        f'<text class="note left" x="{WIDTH - 228}" y="{TOP + 4}">import rooms of amp, never back</text>',
    ]
    for index, row in enumerate(ROWS):
        parts += [_box(name, "thin" if name in THIN else "base" if index < BASE else "room") for name in row]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
