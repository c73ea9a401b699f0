"""A migrated source and the helper that it calls: pasted below its imports, or imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = ("mixed_precision", "under_autocast", "to_float32")
NAME = FUNCTIONS[0]
HELPER_FILE = Path(__file__).with_name("native") / "helper.py"
#: The scaler of a run that calls no ``mixed_precision``.
NO_SCALER = "scaler = torch.amp.GradScaler(enabled=False)  # until mixed_precision() is called"
BLANK_LINES = re.compile(r"(?:[ \t\f]*(?:\r\n|\r|\n))*")


def helper_module(shares_scaler: bool) -> str:
    """The text of the module with the helper, which keeps the scaler where several files use it."""
    code = HELPER_FILE.read_text("utf-8")
    if not shares_scaler:
        return code
    made = code[code.index("    return torch.amp.GradScaler") :].partition("\n")[0]
    kept = f"    global scaler\n{made.replace('return', 'scaler =')}\n    return scaler"
    return code.replace(made, kept).replace("import torch\n", f"import torch\n\n{NO_SCALER}\n", 1)


@dataclass(frozen=True)
class Caller:
    """A migrated source that calls ``mixed_precision`` and does not have it yet.

    Attributes:
        above: Its text as far as its imports go.
        after_imports: The characters in it behind the last import that stands in no block.
        below: The rest of it.
        names: What the functions and modules of the helper are called in it.
        scaler: The statement that defines one scaler for all of its functions, or ``""``.
        newline: What ends its lines.
    """

    above: str
    after_imports: int
    below: str
    names: Mapping[str, str]
    scaler: str
    newline: str

    def with_helper(self) -> str:
        """The source with the helper pasted below its imports."""
        source = HELPER_FILE.read_text("utf-8")
        helper = source[source.index(f"def {NAME}") :]
        for name, chosen in self.names.items():
            helper = re.sub(rf"\b{name}\b", chosen, helper)
        parts = [helper, f"{self.scaler}\n"] if self.scaler else [helper]
        inserted = "".join(f"\n\n{part}" for part in parts)
        blank = BLANK_LINES.match(self.below)
        rest = self.below[blank.end() :] if blank is not None else self.below
        return self.above + self._ended(f"{inserted}\n\n" if rest else inserted) + rest

    def with_import(self, module: str) -> str:
        """The source with the helper imported from ``module``, ``.mixed_precision`` for one of the same package."""
        renamed = f" as {self.names[NAME]}" if self.names[NAME] != NAME else ""
        imports = f"from {module} import {NAME}{renamed}\n"
        scaler = f"\n{self.scaler}\n" if self.scaler else ""
        end = len(self.above) - self.after_imports
        return self.above[:end] + self._ended(imports) + self.above[end:] + self._ended(scaler) + self.below

    def _ended(self, text: str) -> str:
        """A text with the ends of lines that the source has."""
        return text.replace("\n", self.newline)
