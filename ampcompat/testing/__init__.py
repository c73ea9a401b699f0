"""Help with testing code that uses amp: see :func:`assert_opt_level_parity`, and the pytest plugin in ``plugin``.

pytest imports this package at its start, for the plugin: torch is only imported with what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampcompat.testing.parity import assert_opt_level_parity

__all__ = ["assert_opt_level_parity"]


def __getattr__(name: str) -> object:
    if name == "assert_opt_level_parity":
        from ampcompat.testing.parity import assert_opt_level_parity

        return assert_opt_level_parity
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
