"""T5's trouble with float16, small: feed-forward layers whose results pass 65504, the largest float16.

The released T5 checkpoints, trained in bfloat16, have such layers. The one here is built with large weights and learns
which token follows which. Nothing in this file knows of ampcompat. Run it by

    ampcompat run docs/examples/t5.py
    ampcompat run --dtype bf16 docs/examples/t5.py
"""

import argparse
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from apex import amp
except ImportError:
    raise SystemExit("This script needs apex.amp. Run it by: ampcompat run docs/examples/t5.py") from None

TOKENS = 32


class T5LayerNorm(nn.Module):
    """No mean, no bias: the root mean square alone."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class T5FeedForward(nn.Module):
    def __init__(self, width, gain):
        super().__init__()
        self.layer_norm = T5LayerNorm(width)
        self.wi = nn.Linear(width, 4 * width, bias=False)
        self.wo = nn.Linear(4 * width, width, bias=False)
        with torch.no_grad():
            self.wo.weight.mul_(gain)

    def forward(self, hidden_states):
        forwarded = F.relu(self.wi(self.layer_norm(hidden_states)))
        return hidden_states + self.wo(forwarded)


class T5(nn.Module):
    def __init__(self, width=64, gain=3e5):
        super().__init__()
        self.shared = nn.Embedding(TOKENS, width)
        self.block = nn.ModuleList([T5FeedForward(width, 1.0), T5FeedForward(width, gain)])
        self.final_layer_norm = T5LayerNorm(width)
        self.lm_head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens):
        hidden_states = self.shared(tokens)
        for block in self.block:
            hidden_states = block(hidden_states)
        return self.lm_head(self.final_layer_norm(hidden_states))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    follows = torch.randperm(TOKENS, device=args.device)
    model = T5().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    losses = []
    for step in range(args.steps):
        tokens = torch.randint(TOKENS, (16, 8)).to(args.device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), follows[tokens].flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step + 1 == args.steps:
            print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
    print(json.dumps({"finite": sum(map(math.isfinite, losses)), "steps": args.steps, "last": losses[-1]}))


if __name__ == "__main__":
    main()
