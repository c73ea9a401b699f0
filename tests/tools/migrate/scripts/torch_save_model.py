import argparse, os, tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=3)
parser.add_argument('--ckpt', type=str, default='')
parser.add_argument('--fp16', type=int, default=1)


class Segmenter(nn.Module):
    def __init__(self):
        super(Segmenter, self).__init__()
        self.down = nn.Conv2d(1, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.out(F.relu(self.up(F.relu(self.down(x)))))


def dice_loss(pred, mask):
    pred = torch.sigmoid(pred)
    inter = (pred * mask).sum()
    return 1 - (2 * inter + 1) / (pred.sum() + mask.sum() + 1)


if __name__ == '__main__':
    args = parser.parse_args()
    torch.manual_seed(8)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    imgs = torch.randn(32, 1, 8, 8).to(device)
    masks = (F.avg_pool2d(imgs, 3, 1, 1) > 0).float()

    model = Segmenter().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

    it = 0
    for epoch in range(args.epochs):
        for i in range(0, 32, 8):
            pred = model(imgs[i:i + 8])
            loss = dice_loss(pred, masks[i:i + 8])
            optimizer.zero_grad()
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            print('step', it, 'loss', loss.item())
            it += 1

    path = args.ckpt or os.path.join(tempfile.mkdtemp(), 'model.pt')
    torch.save(model, path)
    best = torch.load(path, weights_only=False)
    best.eval()
    with torch.no_grad():
        print('eval', 0, 'loss', dice_loss(best(imgs).float(), masks).item())
