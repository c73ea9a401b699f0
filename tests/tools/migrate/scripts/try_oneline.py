import os, sys, random
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
try: from apex import amp
except ImportError: amp = None

SEED = 5; random.seed(SEED); np.random.seed(SEED); torch.manual_seed(SEED)
USE_APEX = amp is not None
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'

class MLP(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(12, 24); self.b = nn.Linear(24, 1)
    def forward(self, x): return self.b(F.relu(self.a(x))).squeeze(-1)

def batches(n=14, bs=10):
    w = np.linspace(-1, 1, 12).astype('float32')
    for _ in range(n):
        x = np.random.randn(bs, 12).astype('float32'); y = np.tanh(x @ w)
        yield torch.from_numpy(x).to(DEVICE), torch.from_numpy(y).to(DEVICE)

net = MLP().to(DEVICE); opt = torch.optim.SGD(net.parameters(), lr=.1)
if USE_APEX: net, opt = amp.initialize(net, opt, opt_level='O1', verbosity=0)

def step(x, y):
    loss = F.mse_loss(net(x), y); opt.zero_grad()
    if USE_APEX:
        with amp.scale_loss(loss, opt) as sl: sl.backward()
    else: loss.backward()
    opt.step(); return loss.item()

for i, (x, y) in enumerate(batches()): print('step', i, 'loss', step(x, y))
net.eval()
with torch.no_grad(): print('eval', 0, 'loss', sum(F.mse_loss(net(x), y).item() for x, y in batches(3)))
