"""Pretrain, then finetune the same model: fit() calls amp.initialize each time, inference too."""
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from apex import amp


class Estimator:
    def __init__(self, model, lr, device, level='O1'):
        self.model = model.to(device)
        self.lr = lr
        self.device = device
        self.level = level
        self.n = 0
        self.optimizer = None

    def fit(self, batches, lr=None):
        if isinstance(self.model, nn.DataParallel):
            self.model = self.model.module  # amp wants the bare model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr or self.lr, momentum=0.9)
        if self.level is not None:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=self.level, verbosity=0)
        self.model = nn.DataParallel(self.model)
        self.model.train()
        for x, y in batches:
            self._fit_batch(x.to(self.device), y.to(self.device))
        return self

    def _fit_batch(self, x, y):
        self.optimizer.zero_grad()
        pred = self.model(x)
        loss = F.cross_entropy(pred, y)
        if self.level is not None:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        self.optimizer.step()
        print('step', self.n, 'loss', loss.item())
        self.n += 1

    @torch.no_grad()
    def score(self, batches):
        self.model.eval()
        return sum(F.cross_entropy(self.model(x.to(self.device)), y.to(self.device)).item() for x, y in batches) / len(batches)


def load_for_inference(state_dict, device):
    model = build().to(device)
    model = amp.initialize(model, opt_level='O1', verbosity=0)
    model.load_state_dict({k[len('module.'):]: v for k, v in state_dict.items()})
    return model.eval()


def build():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(n, seed, rotate=0):
    g = torch.Generator().manual_seed(seed)
    protos = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    out = []
    for _ in range(n):
        y = torch.randint(0, 4, (12,), generator=g)
        out.append((0.5 * protos[y] + 0.4 * torch.randn(12, 16, generator=g), (y + rotate) % 4))
    return out


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--lr', type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(77)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    est = Estimator(build(), args.lr, device)
    est.fit(batches(8, 0))
    print('eval', 0, 'loss', est.score(batches(2, 5)))
    est.fit(batches(8, 2, rotate=1), lr=args.lr / 2)
    print('eval', 1, 'loss', est.score(batches(2, 6, rotate=1)))
    frozen = load_for_inference(est.model.state_dict(), device)
    with torch.no_grad():
        x, y = batches(1, 7, rotate=1)[0]
        print('eval', 2, 'loss', F.cross_entropy(frozen(x.to(device)).float(), y.to(device)).item())
