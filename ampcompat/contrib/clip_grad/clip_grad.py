"""``clip_grad_norm_`` is torch's, which runs on foreach kernels."""

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
