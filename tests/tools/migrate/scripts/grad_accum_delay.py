import argparse
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from apex import amp

ap = argparse.ArgumentParser()
ap.add_argument('--accumulate', type=int, default=3)
ap.add_argument('--opt', default='O2')
ap.add_argument('--clip', type=float, default=.5)
args = ap.parse_args()


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bn = nn.BatchNorm1d(n)
        self.fc1 = nn.Linear(n, 2 * n)
        self.fc2 = nn.Linear(2 * n, n)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.bn(x))))


def make_model():
    return nn.Sequential(nn.Linear(10, 16), Block(16), Block(16), nn.Linear(16, 3))


def run():
    torch.manual_seed(0)
    dev = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    X = torch.randn(144, 10)
    W = torch.randn(10, 3)
    Y = (X @ W).argmax(1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True)

    model = make_model().to(dev)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt, loss_scale='dynamic')
    criterion = nn.CrossEntropyLoss()

    n = 0
    for epoch in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            is_last = (i + 1) % args.accumulate == 0 or i + 1 == len(loader)
            out = model(x.to(dev))
            loss = criterion(out, y.to(dev)) / args.accumulate
            with amp.scale_loss(loss, optimizer, delay_unscale=not is_last) as scaled_loss:
                scaled_loss.backward()
            if is_last:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            print('step', n, 'loss', loss.item() * args.accumulate)
            n += 1


run()
