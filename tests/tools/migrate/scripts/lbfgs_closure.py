"""Fit a small network with L-BFGS; loss closure under amp."""
import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(3)
dev = 'cuda' if torch.cuda.is_available() else 'cpu'

x = torch.linspace(-2, 2, 40, device=dev).unsqueeze(1)
y = torch.sin(2 * x)

net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(dev)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=1)
net, optimizer = amp.initialize(net, optimizer, opt_level='O1', loss_scale=1.0)
mse = nn.MSELoss()


def closure():
    optimizer.zero_grad()
    loss = mse(net(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    return loss


for i in range(12):
    loss = optimizer.step(closure)
    print('step', i, 'loss', loss.item())
