import importlib
import torch
import torch.nn as nn
import torch.nn.functional as F


def try_import(name):
    """Returns the module or None"""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def get_amp(use_amp):
    if not use_amp:
        return None
    from apex import amp
    return amp


def setup(model, optimizer, amp=None, level="O1"):
    if amp is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    return model, optimizer


def backward(loss, optimizer, amp):
    if amp is None:
        loss.backward()
        return
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def clip(model, optimizer, max_norm, amp=None):
    params = model.parameters() if amp is None else amp.master_params(optimizer)
    return torch.nn.utils.clip_grad_norm_(params, max_norm)


class Matcher(nn.Module):
    """siamese text matcher"""
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(40, 16, mode='mean')
        self.tower = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, a, b):
        u, v = self.tower(self.emb(a)), self.tower(self.emb(b))
        return self.scale * F.cosine_similarity(u, v)


def batch(n, g):
    topic = torch.randint(0, 2, (n, 1), generator=g)
    same = torch.randint(0, 2, (n, 1), generator=g)
    a = torch.randint(0, 20, (n, 6), generator=g) + 20 * topic
    b = torch.randint(0, 20, (n, 6), generator=g) + 20 * (topic ^ (1 - same))
    return a, b, same.squeeze(1).float()


def run_epoch(model, optimizer, amp, device, epoch, n, g):
    total = 0
    for i in range(n):
        a, b, y = (t.to(device) for t in batch(16, g))
        loss = F.binary_cross_entropy_with_logits(model(a, b), y)
        optimizer.zero_grad()
        backward(loss, optimizer, amp)
        clip(model, optimizer, 0.4, amp=amp)
        optimizer.step()
        total += loss.item()
        print('step', epoch * n + i, 'loss', loss.item())
    return total / n


if __name__ == '__main__':
    torch.manual_seed(61)
    g = torch.Generator().manual_seed(62)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    amp = get_amp(True)
    model = Matcher().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = setup(model, optimizer, amp=amp)
    for epoch in range(2):
        mean = run_epoch(model, optimizer, amp, device, epoch, 8, g)
        print('epoch', epoch, 'mean', mean)
