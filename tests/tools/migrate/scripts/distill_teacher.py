import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp


def conv_net(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4))


class KLLoss(nn.Module):
    """Loss with knowledge distillation."""
    def __init__(self, T):
        super().__init__()
        self.T = T

    def forward(self, output, target):
        log_p = F.log_softmax(output / self.T, dim=1)
        q = F.softmax(target / self.T, dim=1)
        return F.kl_div(log_p, q, reduction='batchmean') * self.T ** 2


def fit_teacher(teacher, batches, lr):
    """plain float32 warm-up of the teacher, no amp here"""
    optimizer = torch.optim.SGD(teacher.parameters(), lr=lr, momentum=0.9)
    for x, y in batches:
        loss = F.cross_entropy(teacher(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for p in teacher.parameters():
        p.requires_grad = False
    return teacher.eval()


def make_batches(n, device, seed):
    g = torch.Generator().manual_seed(seed)
    protos = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(88))
    out = []
    for _ in range(n):
        y = torch.randint(0, 4, (12,), generator=g)
        out.append(((protos[y] + 0.5 * torch.randn(12, 1, 6, 6, generator=g)).to(device), y.to(device)))
    return out


def distill(student, teacher, optimizer, batches, alpha, T, start=0):
    kd = KLLoss(T)
    for i, (x, y) in enumerate(batches, start):
        with torch.no_grad():
            soft = teacher(x)
        out = student(x)
        loss = (1 - alpha) * F.cross_entropy(out, y) + alpha * kd(out, soft)
        student.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print('step', i, 'loss', loss.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--alpha', type=float, default=0.7)
    parser.add_argument('--temperature', type=float, default=2.0)
    parser.add_argument('--level', type=int, default=1, help='apex O level')
    args = parser.parse_args()

    torch.manual_seed(55)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    teacher = conv_net(16).to(device)
    student = conv_net(6).to(device)
    fit_teacher(teacher, make_batches(10, device, 1), 0.1)

    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    student, optimizer = amp.initialize(student, optimizer, opt_level='O%i' % args.level)
    distill(student, teacher, optimizer, make_batches(16, device, 2), args.alpha, args.temperature)

    student.eval()
    with torch.no_grad():
        val = [F.cross_entropy(student(x).float(), y).item() for x, y in make_batches(2, device, 3)]
    print('eval', 0, 'loss', sum(val) / len(val))


if __name__ == '__main__':
    main()
