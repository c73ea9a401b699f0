"""Importable for scripts that probe for it; using it names the native replacement."""

from ampcompat._replacements import explain_missing_submodules, refuse

explain_missing_submodules()


def __getattr__(name: str) -> object:
    refuse(__name__, name)
