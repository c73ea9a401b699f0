"""Video classification, everything in half: the inputs follow the dtype of the weights."""
import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(33)
device = torch.device('cuda:0') if torch.cuda.is_available() else torch.device('cpu')


class C2D(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, clip):
        b, t = clip.shape[:2]
        x = torch.relu(self.bn(self.stem(clip.flatten(0, 1))))
        x = x.mean((2, 3)).view(b, t, -1).mean(1)
        return self.classifier(x)


class Meter:
    def __init__(self):
        self.hist = []

    def update(self, v):
        self.hist.append(v)


def to_model_dtype(model, x):
    dtype = next(model.parameters()).dtype
    return x.to(dtype)


def prefetch(n):
    means = torch.randn(3, 1, 3, 1, 1)
    for _ in range(n):
        y = torch.randint(0, 3, (8,))
        yield means[y] + 0.5 * torch.randn(8, 2, 3, 6, 6), y


def main():
    model = C2D().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2', cast_model_outputs=torch.float32)
    crit = nn.CrossEntropyLoss()
    meter = Meter()
    for i, (clip, y) in enumerate(prefetch(14)):
        clip = to_model_dtype(model, clip.to(device))
        if clip.dtype == torch.float16:
            # mean subtraction in half is not accurate enough
            clip = (clip.float() - 0.1).half()
        else:
            clip = clip - 0.1
        out = model(clip)
        loss = crit(out, y.to(device))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        meter.update(loss.item())
        print('step', i, 'loss', meter.hist[-1])


main()
