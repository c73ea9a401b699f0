from collections import namedtuple
from dataclasses import dataclass
from typing import Optional, Tuple

import torch
import torch.nn as nn

from apex import amp

Losses = namedtuple("Losses", "total rec kl")


@dataclass
class ModelOutput:
    logits: torch.Tensor
    loss: Optional[torch.Tensor] = None
    hidden_states: Optional[Tuple[torch.Tensor, ...]] = None
    name: str = ""


class Tagger(nn.Module):
    """token tagging, the loss is computed inside when labels are given"""

    def __init__(self, vocab=25, dim=16, tags=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.head = nn.Linear(dim, tags)

    def forward(self, ids, labels=None):
        h0 = self.emb(ids)
        h1 = torch.relu(self.conv(h0.transpose(1, 2)).transpose(1, 2))
        logits = self.head(h1)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ModelOutput(logits=logits, loss=loss, hidden_states=(h0, h1), name="tagger")


class Beta(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Linear(16, 4)
        self.logvar = nn.Linear(16, 4)
        self.dec = nn.Linear(4, 16)

    def forward(self, h):
        mu, logvar = self.mu(h), self.logvar(h)
        rec = self.dec(mu)
        rec_loss = (rec - h).pow(2).mean()
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        return Losses(total=rec_loss + 0.1 * kl, rec=rec_loss, kl=kl)


def make_batch(g):
    ids = torch.randint(0, 25, (6, 9), generator=g)
    return ids, ids % 4


def main():
    torch.manual_seed(17)
    g = torch.Generator().manual_seed(18)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tagger, beta = Tagger().to(device), Beta().to(device)
    params = [{"params": tagger.parameters()}, {"params": beta.parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(params, lr=0.5)
    (tagger, beta), optimizer = amp.initialize([tagger, beta], optimizer, opt_level="O1")

    for step in range(14):
        ids, labels = make_batch(g)
        out = tagger(ids.to(device), labels=labels.to(device))
        reg = beta(out.hidden_states[-1].detach())
        loss = out.loss + reg.total

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()} rec {reg.rec.item()} kl {reg.kl.item()}")

    with torch.no_grad():
        ids, labels = make_batch(g)
        out = tagger(ids.to(device))
        val = nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), labels.to(device).flatten())
        print(f"eval 0 loss {val.item()}")


if __name__ == "__main__":
    main()
