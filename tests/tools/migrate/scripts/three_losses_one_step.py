"""Multi-task network: a backward for each head under its own loss_id, then one step."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from apex import amp

TASKS = ('depth', 'normals', 'semantic')


class NYU(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(13)
        self.x = torch.randn(n, 3, 6, 6, generator=g)
        self.depth = self.x.mean(1, keepdim=True)
        self.normals = nn.functional.normalize(self.x, dim=1)
        self.semantic = self.x.argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], {t: getattr(self, t)[i] for t in TASKS}


class MTAN(nn.Module):
    def __init__(self):
        super(MTAN, self).__init__()
        self.shared = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleDict({
            'depth': nn.Conv2d(12, 1, 1),
            'normals': nn.Conv2d(12, 3, 1),
            'semantic': nn.Conv2d(12, 3, 1),
        })

    def forward(self, x):
        h = self.shared(x)
        return {name: head(h) for name, head in self.heads.items()}


def task_loss(name, pred, target):
    if name == 'depth':
        return nn.functional.l1_loss(pred, target)
    if name == 'normals':
        return 1 - nn.functional.cosine_similarity(pred, target, dim=1).mean()
    return nn.functional.cross_entropy(pred, target)


def main():
    torch.manual_seed(14)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = MTAN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O1', num_losses=len(TASKS))
    weight = {'depth': 1.0, 'normals': 0.5, 'semantic': 1.0}
    loader = DataLoader(NYU(), batch_size=8, shuffle=True)

    step = 0
    for epoch in range(2):
        for x, targets in loader:
            preds = model(x.to(device))
            losses = {t: weight[t] * task_loss(t, preds[t], targets[t].to(device)) for t in TASKS}
            optimizer.zero_grad()
            for loss_id, t in enumerate(TASKS):
                last = loss_id == len(TASKS) - 1
                with amp.scale_loss(losses[t], optimizer, loss_id=loss_id) as scaled_loss:
                    scaled_loss.backward(retain_graph=not last)
            optimizer.step()
            print('step', step, 'loss', sum(l.item() for l in losses.values()),
                  *[w for t in TASKS for w in (t, losses[t].item())])
            step += 1


if __name__ == '__main__':
    main()
