"""``amp_C``: the functions of apex's extension that scripts call by ``multi_tensor_applier``, on torch's kernels.

All take ``(chunk_size, noop_flag, tensor_lists, ...)``. ``noop_flag`` is an integer tensor of shape ``[1]``; scale and
axpby set it to 1 when they meet an inf or a NaN, and compute on all the same, as apex's did. The lists of one call are
parallel and on one device; each may have its own dtype, arithmetic is float32. Nothing synchronises with the host.
"""

from ampcompat.multi_tensor_apply.arithmetic import multi_tensor_axpby, multi_tensor_l2norm, multi_tensor_scale
from ampcompat.multi_tensor_apply.updates import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_lamb,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_novograd,
    multi_tensor_sgd,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
]
