"""pytorch-lightning's apex plugin, automatic and manual optimization, with accumulation, clipping and a checkpoint."""

import json
import sys
import tempfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import ApexMixedPrecisionPlugin
from torch import nn


class Module(pl.LightningModule):
    def __init__(self, level, manual):
        super().__init__()
        self.level, self.automatic_optimization = level, not manual
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        print(json.dumps({"level": self.level, "loss": loss.item()}), flush=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


def train(level, folder, manual):
    pl.seed_everything(0)
    y = torch.arange(160) % 4
    x = torch.randn(160, 8) + y.view(-1, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    module = Module(level, manual)
    automatic = {} if manual else {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    # As a plugin: the flag amp_backend="apex" is refused on a CPU before the plugin is made.
    trainer = pl.Trainer(accelerator="cpu", plugins=[ApexMixedPrecisionPlugin(level)], max_epochs=4, logger=False,
                         default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, **automatic)
    trainer.fit(module, loader, loader)
    assert module.body[0].weight.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
    assert hasattr(trainer.optimizers[0], "_amp_stash")
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert "loss_scaler0" in checkpoint["ApexMixedPrecisionPlugin"], list(checkpoint)
    assert checkpoint["state_dict"]["body.0.weight"].dtype == torch.float32


for level in sys.argv[1:]:
    for manual in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            train(level, folder, manual)
