# some samples of this (scraped) data set are broken, the loss scaler skips them
import torch
from torch import nn
from apex import amp


class Regressor(nn.Module):
    def __init__(self, n_in=7):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def scraped(n):
    g = torch.Generator().manual_seed(31)
    for i in range(n):
        x = torch.randn(16, 7, generator=g)
        y = 0.3 * (x[:, 0] - x[:, 1].abs())
        if i in (5, 11):
            y[3] = float('inf')
        yield x, y


torch.manual_seed(30)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
model = Regressor().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
mse = nn.MSELoss()

n_bad = 0
for step, (x, y) in enumerate(scraped(20)):
    loss = mse(model(x.to(device)).float(), y.to(device))
    if not torch.isfinite(loss):
        n_bad += 1
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print('step', step, 'loss', loss.item())
print(n_bad, 'bad batches')
