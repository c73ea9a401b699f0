# kaggle: 3 folds, amp.initialize for each of them, early stopping, snapshot averaging
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, Subset
from apex import amp

N_FOLDS = 3
EPOCHS = 2
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def set_seed(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)


def kfold(n, k, seed=0):
    idx = np.random.RandomState(seed).permutation(n)
    folds = np.array_split(idx, k)
    for i in range(k):
        yield np.concatenate([f for j, f in enumerate(folds) if j != i]), folds[i]


class QWKNet(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(p))
        self.head = nn.Linear(24, 1)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.body(x)).view(-1)


def train_model(model, loader, optimizer, criterion, counter):
    model.train()
    avg_loss = 0.
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        output = model(x)
        loss = criterion(output, y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        avg_loss += loss.item() / len(loader)
        print('step', counter[0], 'loss', loss.item())
        counter[0] += 1
    return avg_loss


def test_model(model, loader, criterion):
    model.eval()
    avg_val_loss = 0.
    with torch.no_grad():
        for x, y in loader:
            avg_val_loss += criterion(model(x.to(device)), y.to(device)).item() / len(loader)
    return avg_val_loss


def train_loop(X, lr, fold, model, counter):
    tr, va = fold
    loaders = [DataLoader(Subset(X, ix), batch_size=12, shuffle=sh) for ix, sh in ((tr, True), (va, False))]
    optimizer = torch.optim.Adam(model.parameters(), lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    criterion = nn.MSELoss(reduction='mean').to(device)
    best = np.inf
    for epoch in range(EPOCHS):
        train_loss = train_model(model, loaders[0], optimizer, criterion, counter)
        val_loss = test_model(model, loaders[1], criterion)
        scheduler.step()
        if val_loss < best:
            best = val_loss
            torch.save(model.state_dict(), '/dev/null')
    return best


def main():
    set_seed(11)
    x = torch.randn(72, 10)
    X = TensorDataset(x, x[:, 0] * 0.3 - 0.2 * x[:, 1])
    counter = [0]
    for i, fold in enumerate(kfold(len(X), N_FOLDS)):
        set_seed(i)
        model = QWKNet().to(device)
        best = train_loop(X, 2e-2, fold, model, counter)
        print('eval', i, 'loss', best)


if __name__ == '__main__':
    main()
