"""Attention from gradients (Grad-CAM as a regulariser): features come out of the model and keep their gradient."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        feat = self.features(x)
        return self.fc(feat.mean((2, 3))), feat


def cam_weights(feat):
    if feat.grad is None:
        return None
    w = feat.grad.detach().float().mean((2, 3))
    return w / (w.abs().sum(1, keepdim=True) + 1e-12)


def main():
    torch.manual_seed(101)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4)
    net, optimizer = amp.initialize(net, optimizer, opt_level='O1')
    protos = torch.randn(3, 1, 6, 6)
    importance = torch.ones(8, device=device) / 8
    for i in range(14):
        y = torch.randint(0, 3, (10,))
        x = protos[y] + 0.4 * torch.randn(10, 1, 6, 6)
        logits, feat = net(x.to(device))
        feat.retain_grad()
        ce = F.cross_entropy(logits, y.to(device))
        sparsity = (feat.float().mean((0, 2, 3)) * (1 - importance)).mean()
        loss = ce + 0.1 * sparsity
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        w = cam_weights(feat)
        if w is not None:
            importance = 0.5 * importance + 0.5 * w.abs().mean(0)
        optimizer.step()
        print('step', i, 'loss', loss.item(), 'importance', importance.max().item())


if __name__ == '__main__':
    main()
