"""word2vec-ish skip-gram with the old amp API (before apex 0.1): amp.init() returns a handle"""
import argparse

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument('--amp', action='store_true', default=True)
parser.add_argument('--steps', type=int, default=14)
args = parser.parse_args()

amp_handle = amp.init(enabled=args.amp)
torch.manual_seed(19)
device = 'cuda' if torch.cuda.is_available() else 'cpu'


class SkipGram(nn.Module):
    def __init__(self, vocab=30, dim=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.hidden = nn.Linear(dim, 20)
        self.out = nn.Linear(20, vocab)

    def forward(self, w):
        return self.out(torch.relu(self.hidden(self.emb(w))))


model = SkipGram().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for it in range(args.steps):
    center = torch.randint(0, 30, (40,), device=device)
    context = (center + torch.randint(1, 3, (40,), device=device)) % 30
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(center), context)
    with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print('step', it, 'loss', loss.item())
