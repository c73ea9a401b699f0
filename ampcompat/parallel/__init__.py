"""apex's data parallelism on ``torch.distributed``."""

from torch.distributed import ReduceOp

from ampcompat.parallel.distributed import DistributedDataParallel, Reducer

# Eager: importing the submodule binds its name on this package, and the class must win over the module.
from ampcompat.parallel.LARC import LARC
from ampcompat.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
