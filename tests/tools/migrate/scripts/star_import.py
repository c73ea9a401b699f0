import torch
import torch.nn as nn
import torch.nn.functional as F
from apex.amp import *

device = 'cuda' if torch.cuda.is_available() else 'cpu'
torch.manual_seed(21)


class Autoencoder(nn.Module):
    def __init__(self, d=16, k=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, k))
        self.dec = nn.Sequential(nn.Linear(k, 12), nn.ReLU(), nn.Linear(12, d))

    def forward(self, x):
        z = self.enc(x)
        return self.dec(z), z


basis = 0.3 * torch.randn(4, 16)
def sample(n):
    return torch.randn(n, 4) @ basis


model = Autoencoder().to(device)
optim = torch.optim.SGD(model.parameters(), lr=2.0)
model, optim = initialize(model, optim, opt_level="O1")

for step in range(16):
    x = sample(24).to(device)
    recon, z = model(x)
    loss = F.smooth_l1_loss(recon, x) + 1e-3 * z.float().pow(2).mean()
    optim.zero_grad()
    with scale_loss(loss, optim) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_value_(master_params(optim), 0.004)
    optim.step()
    print("step", step, "loss", loss.item())
