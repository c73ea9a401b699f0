"""``clip_grad_norm_`` is torch's."""

from ampcompat.contrib.clip_grad.clip_grad import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
