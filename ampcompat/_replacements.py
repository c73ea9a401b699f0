"""What ampcompat does not supply of apex, and what to use instead: one table, and the error that quotes it."""

from __future__ import annotations

import importlib
from typing import Any, Final, NoReturn

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


def refuse(package: str, name: str) -> NoReturn:
    """Raise the error for ``name`` of ``package``.

    Raises:
        AttributeError: For names with a leading underscore, which Python itself and its tools look up.
        ImportError: For all others: unlike AttributeError it comes through ``from package import name`` as it is.
    """
    if name.startswith("_"):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    path = f"{package.partition('.')[2]}.{name}"
    known = [key for key in NATIVE if path == key or path.startswith(key + ".")]
    advice = NATIVE[max(known, key=len)] if known else "the plain torch modules"
    raise ImportError(f"apex.{path} - ampcompat does not supply it - use {advice} instead.", name=f"{package}.{name}")


def supply(package: str, name: str, submodules: tuple[str, ...]) -> Any:
    """The submodule ``name`` when it is supplied, else :func:`refuse`."""
    if name in submodules:
        return importlib.import_module(f"{package}.{name}")
    refuse(package, name)


class _Refuser:
    """Meta-path finder, asked last: gives ``import ampcompat.contrib.X`` the same error as the attribute."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        parts = package.split(".")
        if parts[0] == "ampcompat" and len(parts) > 1 and any(key.split(".")[0] == parts[1] for key in NATIVE):
            if name.startswith("_"):
                return
            refuse(package, name)


def explain_missing_submodules() -> None:
    """Put the finder at the end of ``sys.meta_path``, once; it answers for ampcompat's own packages only."""
    import sys

    if not any(finder is _Refuser for finder in sys.meta_path):
        sys.meta_path.append(_Refuser)
