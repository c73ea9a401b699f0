"""Records a checkpoint as pytorch-lightning's apex plugin and its native one write it, on the CPU.

``python -m ampcompat run tests/data/record_lightning.py FILE`` with pytorch-lightning 1.5.10 (among the last to write
``amp_scaling_state``) or 1.9.5, which keeps the state under the plugin's name. Twenty steps, of which three overflow:
two by a huge loss, one by its own activations at the first scale.
"""

import sys
import tempfile
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn

OLD = pl.__version__.startswith("1.5")
OVERFLOWING = (3, 7)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = self(batch[0]).float().pow(2).mean()
        return loss * 1e38 if index in OVERFLOWING else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def checkpoint(plugin):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4))
    with tempfile.TemporaryDirectory() as folder:
        # The plugin itself, since Trainer refuses its flag on a CPU.
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
        options |= {} if OLD else {"accelerator": "cpu"}
        trainer = pl.Trainer(plugins=[plugin], default_root_dir=folder, **options)
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
        (path,) = Path(folder).rglob("*.ckpt")
        return torch.load(path, weights_only=False)


def native():
    scaler = torch.amp.GradScaler("cpu")
    if OLD:
        return pl.plugins.NativeMixedPrecisionPlugin(16, "cpu", scaler)
    return pl.plugins.MixedPrecisionPlugin("16", "cpu", scaler)


if __name__ == "__main__":
    apex = checkpoint(pl.plugins.ApexMixedPrecisionPlugin("O2"))
    # What training with either plugin leaves: the keys of both in one file, the weights are apex's.
    torch.save({**checkpoint(native()), **apex}, sys.argv[1])
