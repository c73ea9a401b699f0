"""apex's contrib: what is a few lines of torch is here; using anything else names the native replacement."""

from typing import Any

from ampcompat._replacements import explain_missing_submodules, supply

explain_missing_submodules()


def __getattr__(name: str) -> Any:
    return supply(__name__, name, ("clip_grad", "optimizers", "xentropy"))
