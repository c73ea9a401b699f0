"""apex's contrib: what is a few lines of torch is here; using anything else names the native replacement."""

from typing import TYPE_CHECKING

from ampcompat._replacements import explain_missing_submodules, supply

if TYPE_CHECKING:
    from ampcompat.contrib import clip_grad as clip_grad
    from ampcompat.contrib import optimizers as optimizers
    from ampcompat.contrib import xentropy as xentropy

explain_missing_submodules()


def __getattr__(name: str) -> object:
    return supply(__name__, name, ("clip_grad", "optimizers", "xentropy"))
