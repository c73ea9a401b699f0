"""Cross entropy with label smoothing, on torch's kernel."""

from torch import Tensor
from torch.nn import functional as F

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """Per-row losses; call :meth:`apply`."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Cross entropy of ``logits`` (N, C) with ``labels`` (N,); rows labelled ``padding_idx`` give 0.

        Computed in float32; the result (N,) has the dtype of ``logits``, or float32 with ``half_to_float``.
        """
        losses = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
        losses = losses.masked_fill(labels == padding_idx, 0)
        return losses if half_to_float else losses.to(logits.dtype)
