"""Metric learning: only the trunk is given to amp, heads are called by index, forward is called by name."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x, normalize=False):
        f = self.layers(x).mean((2, 3))
        return F.normalize(f, dim=1) if normalize else f


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.heads = nn.Sequential(nn.Linear(8, 3), nn.Linear(8, 2))

    def forward(self, x):
        raise RuntimeError("call the parts")


class CenterLoss(nn.Module):
    """has weights of its own, and an optimizer of its own"""
    def __init__(self, n, dim):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(n, dim) * 0.1)

    def forward(self, feat, label):
        return (feat - self.centers[label]).pow(2).sum(1).mean()


def main():
    torch.manual_seed(66)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = Model().to(device)
    center = CenterLoss(3, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer_center = torch.optim.SGD(center.parameters(), lr=0.5)
    model.trunk, [optimizer, optimizer_center] = amp.initialize(model.trunk, [optimizer, optimizer_center],
                                                                opt_level='O1')
    assert isinstance(model.trunk, Trunk)
    protos = 0.5 * torch.randn(3, 2, 1, 1)
    for i in range(16):
        color, size = torch.randint(0, 3, (12,)), torch.randint(0, 2, (12,))
        x = protos[color] * (1 + size[:, None, None, None]) + 0.2 * torch.randn(12, 2, 5, 5)
        x, color, size = x.to(device), color.to(device), size.to(device)
        feat = model.trunk.forward(x)
        loss_color = F.cross_entropy(model.heads[0](feat), color)
        loss_size = F.cross_entropy(model.heads[1](feat), size)
        loss_center = center(feat, color)
        loss = 0.5 * loss_color + 0.2 * loss_size + 0.05 * loss_center
        optimizer.zero_grad()
        optimizer_center.zero_grad()
        with amp.scale_loss(loss, [optimizer, optimizer_center]) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        for param in center.parameters():
            param.grad.data *= (1. / 0.05)
        optimizer_center.step()
        print('step', i, 'loss', loss.item(), 'center', loss_center.item())
    with torch.no_grad():
        print('eval', 0, 'norm', model.trunk(x, normalize=True).float().norm(dim=1).mean().item())


main()
