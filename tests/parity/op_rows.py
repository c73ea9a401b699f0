"""The recorded rows, and which of them a fake CUDA tensor cannot run on a machine without CUDA."""

import json
from pathlib import Path

ROWS = json.loads(Path(__file__).with_name("o1_op_dtypes.json").read_text())

# "PyTorch is not linked with support for cuda devices" from a device guard, or a value is needed (equal).
NOT_FAKE = frozenset(
    [
        *(
            "F.batch_norm",
            "F.ctc_loss",
            "F.grid_sample",
            "F.layer_norm.affine",
            "F.prelu",
            "F.scaled_dot_product_attention",
        ),
        *(
            "Tensor.addmm",
            "Tensor.mv",
            "nn.BatchNorm1d",
            "nn.GRUCell",
            "nn.LSTMCell",
            "nn.Linear",
            "nn.MultiheadAttention",
        ),
        *("nn.RNNCell", "torch.addbmm", "torch.addmm", "torch.addmv", "torch.addr", "torch.baddbmm", "torch.cross"),
        *("torch.dot", "torch.equal", "torch.mv"),
    ]
)
