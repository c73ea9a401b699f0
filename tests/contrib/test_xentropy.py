"""``apex.contrib.xentropy``: cross entropy with label smoothing and padding."""

import pytest
import torch

from ampcompat.contrib.xentropy import SoftmaxCrossEntropyLoss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_follows_the_definition(smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4), torch.tensor([0, 2, 3])
    log_p = logits.log_softmax(-1)
    target = torch.nn.functional.one_hot(labels, 4) * (1 - smoothing) + smoothing / 4
    expected = -(target * log_p).sum(-1)
    expected[0] = 0  # padding
    torch.testing.assert_close(SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing), expected)
    assert SoftmaxCrossEntropyLoss.apply(logits.half(), labels).dtype is torch.float16
    assert SoftmaxCrossEntropyLoss.apply(logits.half(), labels, 0.0, 0, True).dtype is torch.float32
