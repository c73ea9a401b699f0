"""``amp_C``: the functions of apex's extension that scripts call by ``multi_tensor_applier``, on torch's kernels.

They have the parameters of apex's binding, by position and by name: ``(chunk_size, noop_flag, tensor_lists, ...)``.
``chunk_size`` is without effect. ``noop_flag`` is an integer tensor of one element. Scale, axpby and the norms set it
to 1 when they meet an inf or a NaN, and compute on all the same, as apex's did. Where it is set on entry,
``multi_tensor_sgd``, ``multi_tensor_adam_capturable``, ``multi_tensor_adam_capturable_master`` and
``multi_tensor_lamb_mp`` write nothing; the others do not look at it. The lists of one call are parallel and on one
device; each tensor may have its own dtype, arithmetic is float32. Nothing synchronises with the host.
"""

from ampcompat.multi_tensor_apply.arithmetic import multi_tensor_axpby, multi_tensor_scale
from ampcompat.multi_tensor_apply.capturable import multi_tensor_adam_capturable, multi_tensor_adam_capturable_master
from ampcompat.multi_tensor_apply.lamb import (
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
)
from ampcompat.multi_tensor_apply.loss_scale import update_scale_hysteresis
from ampcompat.multi_tensor_apply.norms import (
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_unscale_l2norm,
)
from ampcompat.multi_tensor_apply.updates import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_novograd,
    multi_tensor_sgd,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
