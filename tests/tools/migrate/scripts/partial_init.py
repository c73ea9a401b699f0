import functools
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

OPT_LEVEL = os.environ.get('OPT_LEVEL', 'O1')
half_precision = functools.partial(amp.initialize, opt_level=OPT_LEVEL, verbosity=0)


class TDNN(nn.Module):
    """speaker embedding"""
    def __init__(self, feat=8, n_spk=5):
        super().__init__()
        self.frame1 = nn.Conv1d(feat, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm1d(16)
        self.frame2 = nn.Conv1d(16, 16, 3, dilation=2, padding=2)
        self.bn2 = nn.BatchNorm1d(16)
        self.segment = nn.Linear(32, 16)
        self.output = nn.Linear(16, n_spk)

    def forward(self, x):
        x = self.bn1(F.relu(self.frame1(x)))
        x = self.bn2(F.relu(self.frame2(x)))
        stats = torch.cat([x.mean(2), x.std(2)], 1)
        emb = self.segment(stats)
        return self.output(F.relu(emb)), emb


def build(cfg):
    net = TDNN().to(cfg['device'])
    opt = torch.optim.SGD(net.parameters(), cfg['lr'], momentum=0.9)
    return half_precision(net, opt)


def fit(cfg):
    torch.manual_seed(cfg['seed'])
    net, opt = build(cfg)
    means = torch.randn(5, 8, 1)
    step = 0
    for epoch in range(cfg['epochs']):
        for _ in range(cfg['per_epoch']):
            spk = torch.randint(0, 5, (10,))
            feats = means[spk] + torch.randn(10, 8, 12)
            logits, _ = net(feats.to(cfg['device']))
            loss = F.cross_entropy(logits, spk.to(cfg['device']))
            opt.zero_grad(set_to_none=True)
            with amp.scale_loss(loss, opt) as s:
                s.backward()
            opt.step()
            print('step', step, 'loss', loss.item())
            step += 1
        for g in opt.param_groups:
            g['lr'] *= 0.5
    return net


if __name__ == '__main__':
    fit(dict(seed=6, lr=0.05, epochs=2, per_epoch=7, device='cuda' if torch.cuda.is_available() else 'cpu'))
