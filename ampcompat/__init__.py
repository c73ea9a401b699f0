"""``apex.amp``, whole, on native torch AMP.

``from apex import X`` becomes ``from ampcompat import X``. Importing this package changes nothing in torch and does
not initialise CUDA; every change to torch is made by ``amp.initialize`` (or by the alias) and can be undone.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampcompat.alias import install_as_apex, uninstall_as_apex

    from . import RNN as RNN
    from . import amp as amp
    from . import contrib as contrib
    from . import fp16_utils as fp16_utils
    from . import fused_dense as fused_dense
    from . import mlp as mlp
    from . import multi_tensor_apply as multi_tensor_apply
    from . import normalization as normalization
    from . import optimizers as optimizers
    from . import parallel as parallel
    from . import pyprof as pyprof
    from . import reparameterization as reparameterization
    from . import testing as testing
    from . import transformer as transformer

__version__ = "0.2.0"

# ``import apex`` made these attributes; they are imported on first use, so that ``import ampcompat`` costs nothing.
_SUBMODULES = (
    "RNN",
    "amp",
    "contrib",
    "fp16_utils",
    "fused_dense",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "pyprof",
    "reparameterization",
    "testing",
    "transformer",
)
_FUNCTIONS = ("install_as_apex", "uninstall_as_apex")

__all__ = ["__version__", "install_as_apex", "uninstall_as_apex", *_SUBMODULES]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        try:
            return _submodule(name)
        except ModuleNotFoundError as missing:
            if missing.name != f"{__name__}.{name}":
                raise
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.alias"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _submodule(name: str) -> ModuleType:
    module = importlib.import_module(f"{__name__}.{name}")
    alias = sys.modules.get(f"{__name__}.alias")
    if alias is not None:
        alias.name_modules()
    return module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
