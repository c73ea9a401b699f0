import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from apex import amp


class _SoftRank(Function):
    @staticmethod
    @amp.float_function
    def forward(ctx, x, t):
        y = torch.sigmoid((x[:, :, None] - x[:, None, :]) / t)
        ctx.save_for_backward(y)
        ctx.t = t
        return y.sum(2)

    @staticmethod
    @amp.float_function
    def backward(ctx, grad):
        y, = ctx.saved_tensors
        d = y * (1 - y) / ctx.t
        gx = grad * d.sum(2) - (d * grad[:, :, None]).sum(1)
        return gx, None


soft_rank = _SoftRank.apply


class FocalLoss(nn.Module):
    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma

    @amp.float_function
    def forward(self, logits, target):
        logp = F.log_softmax(logits, dim=1).gather(1, target[:, None]).squeeze(1)
        return (-(1 - logp.exp()) ** self.gamma * logp).mean()


torch.manual_seed(23)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
focal = FocalLoss().to(device)
W = torch.randn(9, 5)

for step in range(16):
    x = torch.randn(20, 9)
    score = x @ W
    x, target = x.to(device), score.argmax(1).to(device)
    logits = model(x)
    rank = soft_rank(logits, 1.0)
    loss = focal(logits, target) + 0.05 * F.mse_loss(rank, soft_rank(score.to(device), 1.0).to(rank.dtype))
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print('step', step, 'loss', loss.item())
