"""In which settings a mistake at a block of ``amp.scale_loss`` is one."""

from __future__ import annotations

from ampcompat.tools.check.findings import ERROR, WARNING
from ampcompat.tools.check.settings import Setting


def with_masters(setting: Setting) -> str | None:
    """An error where the optimizer steps masters."""
    if setting.masters is None:
        return WARNING
    return ERROR if setting.masters else None


def perhaps_with_masters(setting: Setting) -> str | None:
    """A warning where the optimizer steps masters, if the code does not prove that they are of that model."""
    return WARNING if with_masters(setting) else None


def with_scale(setting: Setting) -> str | None:
    """An error where gradients are multiplied by the loss scale."""
    if setting.is_scaled is None:
        return WARNING
    return ERROR if setting.is_scaled else None


def with_masters_or_scale(setting: Setting) -> str | None:
    """An error where a block does anything to gradients at its end."""
    grades = (with_masters(setting), with_scale(setting))
    return ERROR if ERROR in grades else next(filter(None, grades), None)
