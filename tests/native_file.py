"""``native_amp.py``, the file that ``migrate --to native`` copies, as modules of their own."""

import importlib.abc
import importlib.util
import sys
from types import CodeType, ModuleType

import pytest

from ampcompat.tools.migrate.copied import TEXT


class Text(importlib.abc.InspectLoader):
    """Loads a module from its source, which is in no file."""

    def get_source(self, fullname: str) -> str:
        """Return the source."""
        return TEXT

    def get_code(self, fullname: str) -> CodeType:
        """Compile it under the name of the file that it is written to, so that tracebacks name one."""
        return compile(TEXT, f"{fullname}.py", "exec")


def native_amp() -> ModuleType:
    """Return a new module of the file, with a state of its own, which ``import`` does not find."""
    spec = importlib.util.spec_from_loader("native_amp", Text())
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "native_amp", module)  # dataclasses look there
        spec.loader.exec_module(module)
    return module
