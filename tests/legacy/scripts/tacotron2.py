import argparse
import json
import math
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument('--fp16_run', type=bool, default=True)
parser.add_argument('--grad_clip_thresh', type=float, default=1.0)
hparams = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Tacotron2(nn.Module):
    def __init__(self):
        super(Tacotron2, self).__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(16, 16)
        self.projection = nn.Linear(16, 4)
        if hparams.fp16_run:
            self.score_mask_value = torch.finfo(torch.float16).min

    def forward(self, text):
        memory, _ = self.encoder(self.embedding(text))
        h, c = memory.new_zeros(text.size(0), 16), memory.new_zeros(text.size(0), 16)
        out = []
        for t in range(memory.size(1)):
            h, c = self.decoder(memory[:, t], (h, c))
            out.append(self.projection(h))
        return torch.stack(out, 1)


def reduce_tensor(tensor, n_gpus):
    rt = tensor.clone()
    torch.distributed.all_reduce(rt)
    rt /= n_gpus
    return rt


def train():
    n_gpus, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if n_gpus > 1:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1234)
    model = Tacotron2().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6, eps=1e-4)
    if hparams.fp16_run:
        from apex import amp
        model, optimizer = amp.initialize(model, optimizer, opt_level='O2')
    if n_gpus > 1:
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(model)
    criterion = nn.MSELoss()
    is_overflow = False
    table = torch.randn(20, 4, device=device)
    torch.manual_seed(rank)
    for iteration in range(30):
        x = torch.randint(0, 20, (8, 6), device=device)
        y = table[x]
        model.zero_grad()
        loss = criterion(model(x), y)
        reduced_loss = reduce_tensor(loss.data, n_gpus).item() if n_gpus > 1 else loss.item()
        if hparams.fp16_run:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if hparams.fp16_run:
            grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), hparams.grad_clip_thresh)
            is_overflow = math.isnan(grad_norm)
        optimizer.step()
        if not is_overflow and rank == 0:
            print(json.dumps({"step": iteration, "loss": reduced_loss, "grad_norm": float(grad_norm)}))


if __name__ == '__main__':
    train()
