"""``import apex`` under another roof: the names of :data:`ROOTS`, apex and its extensions, are ampcompat's modules.

A finder on ``sys.meta_path`` answers for these names and everything below them. What it returns is the very same
module object (``apex.amp is ampcompat.amp``), never a copy: one process must not hold two amp states.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

import ampcompat
from ampcompat._extensions import EXTENSIONS
from ampcompat._replacements import advice, covers, is_import
from ampcompat._state import state

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["install_as_apex", "uninstall_as_apex"]

ROOTS = {"apex": "ampcompat", **{name: f"ampcompat.{name}" for name in EXTENSIONS}}


def install_as_apex(force: bool = False) -> bool:
    """Make ``import apex`` and every ``apex.X`` import resolve to ampcompat, in this process.

    ``importlib.util.find_spec("apex")`` and ``importlib.metadata.version("apex")`` answer too. A second call does
    nothing. Undone by :func:`uninstall_as_apex`.

    Args:
        force: Take the name even from an installed apex that still has ``amp``; otherwise that one is left alone.
            Either is said in one line.

    Returns:
        Whether the alias is in force after the call.
    """
    if _finder() is not None:
        return True
    real = real_apex()
    if real is not None:
        from ampcompat._log import say

        if not force:
            say(f"ampcompat: the apex at {real} has amp and is left alone; force=True (run --force) takes its place.")
            return False
        say(f"ampcompat: takes the place of the apex at {real}, which has amp too.")
    sys.meta_path.insert(0, AliasFinder(displaced=_take_modules()))
    state.undo.callback(uninstall_as_apex)
    return True


def uninstall_as_apex() -> None:
    """Undo :func:`install_as_apex`: the names are free again, and modules that it displaced are back."""
    finder = _finder()
    if finder is not None:
        sys.meta_path.remove(finder)
        _take_modules()
        sys.modules.update(finder.displaced)


class AliasFinder(MetaPathFinder):
    """Finds the names of :data:`ROOTS` and all below them in ampcompat, and answers for apex's distribution."""

    def __init__(self, displaced: dict[str, ModuleType]) -> None:
        self.displaced = displaced

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias; None for a name that is not ours, or that a probe finds missing."""
        home = _home(fullname)
        if home is None:
            return None
        found = importlib.util.find_spec(home)
        if found is None:
            if is_import(sys._getframe(1)):
                raise _missing(fullname)
            return None
        spec = ModuleSpec(fullname, AliasLoader(home), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """The distribution named apex, which transformers and Lightning ask for by ``importlib.metadata``."""
        name = None if context is None else context.name
        if name is not None and name.lower() != "apex":
            return []
        from ampcompat._distribution import ApexDistribution

        return [ApexDistribution()]


class AliasLoader(Loader):
    """Loads an alias: the module that is already there under its own name."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        module = importlib.import_module(self.home)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed; the import machinery wrote the alias's spec on the module, which is taken back."""
        module.__spec__ = self.own_spec
        name_modules()

    def get_code(self, fullname: str) -> CodeType | None:
        """Code of the module, for ``python -m apex.parallel.multiproc``."""
        found = importlib.util.find_spec(self.home)
        read = getattr(found.loader if found else None, "get_code", None)
        code: CodeType | None = read(self.home) if read else None
        return code


def name_modules() -> None:
    """Put every module of ampcompat's that is imported into ``sys.modules`` by apex's name too, while that is an alias.

    ``from apex import amp`` finds an attribute of ampcompat and imports nothing by apex's name, and scripts look for
    that. Also, the machinery binds a freshly imported submodule on its parent: amp._amp_state is a module and an object
    of that name on the parent, so its alias has to be known before anybody imports it.
    """
    if _finder() is None:
        return
    ours = [name for name in list(sys.modules) if _below(name, "ampcompat")]
    for alias, home in ROOTS.items():
        for name in ours:
            if _below(name, home):
                sys.modules.setdefault(alias + name[len(home) :], sys.modules[name])


def _below(name: str, root: str) -> bool:
    return name == root or name.startswith(root + ".")


def _home(name: str) -> str | None:
    """The name in ampcompat that stands behind ``name``; None when it is not one of ours."""
    root, _, rest = name.partition(".")
    if root not in ROOTS:
        return None
    return ".".join(filter(None, (ROOTS[root], rest)))


def _finder() -> AliasFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, AliasFinder)), None)


def _take_modules() -> dict[str, ModuleType]:
    """Remove every imported module that goes by one of the names of :data:`ROOTS`, and return them."""
    names = [name for name in sys.modules if _home(name) is not None]
    return {name: sys.modules.pop(name) for name in names}


def real_apex() -> str | None:
    """Find the folder of an installed apex that has ``amp``, or None; nothing of it is imported."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # somebody put a stand-in without a spec into sys.modules
        return None
    for place in (spec.submodule_search_locations if spec else None) or []:
        if (Path(place) / "amp" / "__init__.py").is_file():
            return place
    return None


def _missing(name: str) -> ModuleNotFoundError:
    rest = name.partition(".")[2]
    if covers(rest):
        return ModuleNotFoundError(advice(rest), name=name)
    there = ", ".join(part for part in ampcompat._SUBMODULES if importlib.util.find_spec(f"ampcompat.{part}"))
    return ModuleNotFoundError(
        f"No module named {name!r} in ampcompat, which replaces apex - it has {there} - docs/namespace.md tells"
        " what to do about the rest.",
        name=name,
    )
