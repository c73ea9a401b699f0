"""Where apex had the ``SyncBatchNorm`` of its compiled kernels."""

from ampcompat.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
