"""``apex.multi_tensor_apply``: calls an ``amp_C`` function on lists of tensors."""

from ampcompat.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
