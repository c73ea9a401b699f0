'''Train a small ResNet on (fake) CIFAR-10 with PyTorch.'''
from __future__ import print_function

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.backends.cudnn as cudnn
from torch.utils.data import DataLoader, TensorDataset

from apex import amp

parser = argparse.ArgumentParser(description='PyTorch CIFAR10 Training')
parser.add_argument('--lr', default=0.05, type=float, help='learning rate')
parser.add_argument('--epochs', default=3, type=int)
parser.add_argument('--batch-size', default=16, type=int)
parser.add_argument('--seed', default=1, type=int)
parser.add_argument('--opt-level', default='O1', type=str)
parser.add_argument('--out', default=None)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super(BasicBlock, self).__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion*planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion*planes, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion*planes)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class ResNet(nn.Module):
    def __init__(self, num_classes=10):
        super(ResNet, self).__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = BasicBlock(8, 16, stride=2)
        self.linear = nn.Linear(16, num_classes)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        out = F.adaptive_avg_pool2d(out, 1)
        return self.linear(out.view(out.size(0), -1))


def fake_cifar(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    proto = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    x = proto[y] + 0.3 * torch.randn(n, 3, 8, 8, generator=g)
    return TensorDataset(x, y)


def accuracy(output, target):
    pred = output.argmax(1)
    return (pred == target).float().mean().item()


def train(loader, model, criterion, optimizer, epoch, device):
    model.train()
    running = 0.
    for i, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = model(inputs)
        loss = criterion(outputs, targets)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        running += loss.item()
        print('step', epoch * len(loader) + i, 'loss', float(loss))
    return running / len(loader)


def validate(loader, model, criterion, device):
    model.eval()
    losses, accs = 0., 0.
    with torch.no_grad():
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = model(inputs)
            losses += criterion(outputs, targets).item()
            accs += accuracy(outputs, targets)
    return losses / len(loader), accs / len(loader)


def save_checkpoint(state, filename):
    torch.save(state, filename)


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'

    trainloader = DataLoader(fake_cifar(96, 0), batch_size=args.batch_size, shuffle=True)
    testloader = DataLoader(fake_cifar(32, 1), batch_size=32, shuffle=False)

    model = ResNet().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
    cudnn.benchmark = True

    best_loss = 1e9
    out = args.out or tempfile.mkdtemp()
    for epoch in range(args.epochs):
        train_loss = train(trainloader, model, criterion, optimizer, epoch, device)
        test_loss, test_acc = validate(testloader, model, criterion, device)
        scheduler.step()
        print('eval', epoch, 'loss', test_loss)
        print('Epoch %d: train %.3f test %.3f acc %.2f' % (epoch, train_loss, test_loss, test_acc))
        if test_loss < best_loss:
            best_loss = test_loss
            save_checkpoint({
                'epoch': epoch,
                'net': model.state_dict(),
                'optimizer': optimizer.state_dict(),
                'amp': amp.state_dict(),
            }, os.path.join(out, 'best.pth'))


if __name__ == '__main__':
    main()
