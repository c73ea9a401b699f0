"""List the parts of apex that ampcompat does not supply, with replacements, and make the error that quotes them."""

from __future__ import annotations

import importlib
import sys
from types import FrameType, ModuleType
from typing import Final, NoReturn

from ampcompat._state import state

NATIVE: Final[dict[str, str]] = {
    "RNN": "torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
    "contrib.bottleneck": "torchvision.models.resnet.Bottleneck",
    "contrib.conv_bias_relu": "torch.nn.Conv2d and torch.nn.ReLU under torch.compile",
    "contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "contrib.group_norm": "torch.nn.GroupNorm",
    "contrib.groupbn": "torch.nn.SyncBatchNorm with torch.channels_last",
    "contrib.index_mul_2d": "plain indexing and multiplication",
    "contrib.layer_norm": "ampcompat.normalization.FusedLayerNorm",
    "contrib.multihead_attn": "torch.nn.functional.scaled_dot_product_attention or torch.nn.MultiheadAttention",
    "contrib.sparsity": "torch.ao.pruning or torch.sparse.to_sparse_semi_structured",
    "contrib.transducer": "torchaudio.functional.rnnt_loss",
    "contrib.optimizers": "ampcompat.optimizers, torch.distributed.optim.ZeroRedundancyOptimizer or torch FSDP",
    "fused_dense": "torch.nn.Linear and torch.nn.GELU under torch.compile",
    "pyprof": "torch.profiler",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "transformer": "torch.distributed.tensor.parallel and torch.distributed.pipelining",
}


def advice(path: str) -> str:
    """Say what to use instead of ``apex.<path>``."""
    known = [key for key in NATIVE if path == key or path.startswith(key + ".")]
    instead = NATIVE[max(known, key=len)] if known else "the plain torch modules"
    return f"apex.{path} - ampcompat does not supply it - use {instead} instead."


def covers(path: str) -> bool:
    """Whether ``path`` is in one of the packages that name replacements."""
    return any(key.partition(".")[0] == path.partition(".")[0] for key in NATIVE)


def refuse(package: str, name: str) -> NoReturn:
    """Raise the error for ``name`` of ``package``; to be called by the package's ``__getattr__``.

    Raises:
        ImportError: ``from package import name`` asks: Python would put words of its own in the place of another.
        AttributeError: Everybody else: ``hasattr`` is False, and what uses the attribute reads the same advice.
    """
    message = advice(f"{package.partition('.')[2]}.{name}")
    asker: FrameType | None = sys._getframe(1)
    while asker is not None and asker.f_globals.get("__name__") in (__name__, package):
        asker = asker.f_back
    # An underscore first: names that Python and its tools look up.
    if asker is not None and asker.f_code.co_name == "_handle_fromlist" and not name.startswith("_"):
        raise ImportError(message, name=f"{package}.{name}")
    raise AttributeError(message)


def supply(package: str, name: str, submodules: tuple[str, ...]) -> ModuleType:
    """The submodule ``name`` when it is supplied, else :func:`refuse`."""
    if name in submodules:
        return importlib.import_module(f"{package}.{name}")
    refuse(package, name)


class _Refuser:
    """Meta-path finder, asked last: gives ``import ampcompat.contrib.X`` the advice too."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        root, _, rest = fullname.partition(".")
        if root == "ampcompat" and covers(rest) and is_import(sys._getframe(1)):
            raise ModuleNotFoundError(advice(rest), name=fullname)


def is_import(caller: FrameType) -> bool:
    """Whether an import statement asks the finder, which deserves a reason; a probe (``find_spec``) just gets None."""
    asker = caller.f_back
    return asker is not None and asker.f_code.co_name == "_find_and_load_unlocked"


def explain_missing_submodules() -> None:
    """Put the finder at the end of ``sys.meta_path``, once; it answers for ampcompat's own packages only."""
    if not any(finder is _Refuser for finder in sys.meta_path):
        sys.meta_path.append(_Refuser)
        state.undo.callback(_withdraw)


def _withdraw() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Refuser]
