import json
import os
import tempfile

import torch
import torch.nn as nn

try:
    # noinspection PyUnresolvedReferences
    from apex import amp
except ImportError:
    amp = None

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attn = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return x + self.proj(attn.softmax(dim=-1) @ v)


def get_grad_norm(parameters, norm_type=2):
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(filter(lambda p: p.grad is not None, parameters))
    total_norm = 0
    for p in parameters:
        total_norm += p.grad.data.norm(norm_type).item() ** norm_type
    return total_norm ** (1. / norm_type)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), Block(16), nn.Flatten(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-5, betas=(0.9, 0.999), lr=3e-3, weight_decay=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    return model, optimizer


def main():
    assert amp is not None, "amp not installed!"
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    rank = int(os.environ.get("RANK", 0))
    if distributed:
        torch.distributed.init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo', init_method='env://')
    model, optimizer = build()
    if distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    model_without_ddp = model.module if distributed else model
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    criterion = torch.nn.CrossEntropyLoss()
    torch.manual_seed(rank)
    for idx in range(30):
        targets = torch.randint(0, 3, (12,), device=device)
        samples = torch.randn(12, 4, 6, device=device) + targets.view(-1, 1, 1).float()
        loss = criterion(model(samples), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if idx % 2:
            grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        else:
            grad_norm = get_grad_norm(amp.master_params(optimizer))
        optimizer.step()
        lr_scheduler.step()
        if rank == 0:
            print(json.dumps({"step": idx, "loss": loss.item(), "grad_norm": float(grad_norm)}))
        if idx == 14 and rank == 0:
            with tempfile.TemporaryDirectory() as output:
                save_state = {'model': model_without_ddp.state_dict(), 'optimizer': optimizer.state_dict(),
                              'lr_scheduler': lr_scheduler.state_dict()}
                save_state['amp'] = amp.state_dict()
                torch.save(save_state, os.path.join(output, 'ckpt.pth'))
                checkpoint = torch.load(os.path.join(output, 'ckpt.pth'), map_location='cpu')
            msg = model_without_ddp.load_state_dict(checkpoint['model'], strict=False)
            assert not msg.missing_keys
            optimizer.load_state_dict(checkpoint['optimizer'])
            lr_scheduler.load_state_dict(checkpoint['lr_scheduler'])
            if 'amp' in checkpoint:
                amp.load_state_dict(checkpoint['amp'])


if __name__ == '__main__':
    main()
