import argparse
import math
import os
import torch
import torch.nn as nn

try:
    from apex import amp
    APEX_AVAILABLE = True
except ModuleNotFoundError:
    APEX_AVAILABLE = False

parser = argparse.ArgumentParser(description='word-level language model')
parser.add_argument('--emsize', type=int, default=16)
parser.add_argument('--lr', type=float, default=2)
parser.add_argument('--clip', type=float, default=0.25)
parser.add_argument('--epochs', type=int, default=2)
parser.add_argument('--bptt', type=int, default=6)
parser.add_argument('--amp', type=int, default=1)
args = parser.parse_args()

model = None
optimizer = None
criterion = nn.CrossEntropyLoss()
use_amp = bool(args.amp) and APEX_AVAILABLE
ntokens = 24
step_no = 0
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Config:
    def __init__(self, **kwargs):
        for k, v in kwargs.items():
            setattr(self, k, v)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(config.block_size, config.block_size)))

    def forward(self, x):
        T = x.size(1)
        att = (self.query(x) @ self.key(x).transpose(-2, -1)) * (1.0 / math.sqrt(x.size(-1)))
        att = att.masked_fill(self.mask[:T, :T] == 0, float('-inf'))
        return torch.softmax(att, dim=-1) @ self.value(x)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx):
        x = self.tok_emb(idx)
        x = x + self.attn(x)
        return self.head(self.ln(x))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i:i+seq_len].t().to(device), source[i+1:i+1+seq_len].t().reshape(-1).to(device)


def evaluate(data_source):
    model.eval()
    total_loss = 0.
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output = model(data).view(-1, ntokens)
            total_loss += data.size(1) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(train_data):
    global step_no
    model.train()
    for i in range(0, train_data.size(0) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        output = model(data)
        loss = criterion(output.view(-1, ntokens), targets)
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        print('step', step_no, 'loss', loss.item())
        step_no += 1


def build():
    global model, optimizer
    torch.manual_seed(1111)
    model = GPT(Config(vocab_size=ntokens, n_embd=args.emsize, block_size=args.bptt)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    if use_amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    else:
        print('apex is not used')


def main():
    build()
    corpus = (torch.arange(400) * 5 + torch.randint(0, 2, (400,))) % ntokens
    train_data, val_data = batchify(corpus[:336], 8), batchify(corpus[336:], 4)
    best = None
    for epoch in range(args.epochs):
        train(train_data)
        val_loss = evaluate(val_data)
        print('eval', epoch, 'loss', val_loss)
        if not best or val_loss < best:
            torch.save(model.state_dict(), os.devnull)
            best = val_loss
        else:
            for g in optimizer.param_groups:
                g['lr'] /= 4.0


main()
