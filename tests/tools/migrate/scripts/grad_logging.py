# Training with per-layer gradient statistics, the poor man's tensorboard
import collections
import math

import torch
from torch import nn
from apex import amp


class ScalarWriter(object):
    def __init__(self):
        self.scalars = collections.defaultdict(list)

    def add_scalar(self, tag, value, step):
        self.scalars[tag].append((step, float(value)))


writer = ScalarWriter()


class CNN1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv1d(4, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.norm(self.embed(x)))
        return self.head(h.mean(-1)).squeeze(1)


def log_gradients(model, step):
    total = 0.
    for name, p in model.named_parameters():
        if p.grad is not None:
            g = p.grad.detach().float().norm(2).item()
            writer.add_scalar('grad/' + name, g, step)
            total += g ** 2
    return math.sqrt(total)


def data(n_steps):
    g = torch.Generator().manual_seed(10)
    for _ in range(n_steps):
        x = torch.randn(16, 4, 10, generator=g)
        y = (x[:, 0].mean(-1) > 0).float()
        yield x, y


def main():
    torch.manual_seed(11)
    device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')
    model = CNN1d().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    bce = nn.BCEWithLogitsLoss()

    for step, (x, y) in enumerate(data(15)):
        x = x.to(device)
        y = y.to(device)
        optimizer.zero_grad()
        loss = bce(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

        writer.add_scalar('loss', loss, step)
        grad_norm = log_gradients(model, step)
        optimizer.step()
        print(f'step {step} loss {loss.item()} grad_norm {grad_norm}')


if __name__ == '__main__':
    main()
