"""Answer ``importlib.metadata`` queries for apex while the alias is in force."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from ampcompat import __version__
from ampcompat._extensions import EXTENSIONS

SHIM = Path(__file__).parent / "_shim"


class ApexDistribution(Distribution):
    """A distribution named apex, with ampcompat's version."""

    def read_text(self, filename: str) -> str | None:
        """The two metadata files that are asked for."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: apex\nVersion: {__version__}\nSummary: ampcompat's alias\n",
            "top_level.txt": "\n".join(("apex", *EXTENSIONS, "")),
        }.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """A path in the directory that stands for apex."""
        return SHIM / path
