"""Cross entropy with label smoothing, on torch's kernel."""

from ampcompat.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
