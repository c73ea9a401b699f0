"""Home of a name that files import from ``apex.amp.compat`` at their top; apex had tests for old versions of torch."""

from collections.abc import Iterable

__all__ = ["filter_attrs"]


def filter_attrs(module: object, attrs: Iterable[str]) -> list[str]:
    """List the names among ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]
