import logging
from types import SimpleNamespace

import torch
import torch.nn as nn
from apex import amp
from torch.utils.data import DataLoader, TensorDataset


class BaseTrainer:
    """
    Base class for all trainers
    """
    def __init__(self, model, loss, metrics, optimizer, config):
        self.config = config
        self.logger = logging.getLogger('trainer')
        self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        self.model = model.to(self.device)
        self.loss = loss
        self.metrics = metrics
        self.optimizer = optimizer
        if self.config.apex:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level='O1', verbosity=0)
        self.epochs = config.epochs
        self.start_epoch = 1
        self.monitor_best = float('inf')
        self.not_improved_count = 0

    def _train_epoch(self, epoch):
        raise NotImplementedError

    def train(self):
        for epoch in range(self.start_epoch, self.epochs + 1):
            result = self._train_epoch(epoch)
            log = {'epoch': epoch}
            log.update(result)
            for key, value in log.items():
                self.logger.info('    {:15s}: {}'.format(str(key), value))
            print('eval {} loss {}'.format(epoch, log['val_loss']))
            if log['val_loss'] < self.monitor_best:
                self.monitor_best = log['val_loss']
                self.not_improved_count = 0
                self.best = self._checkpoint(epoch)
            else:
                self.not_improved_count += 1

    def _checkpoint(self, epoch):
        return {
            'arch': type(self.model).__name__,
            'epoch': epoch,
            'state_dict': self.model.state_dict(),
            'optimizer': self.optimizer.state_dict(),
            'monitor_best': self.monitor_best,
        }


class Trainer(BaseTrainer):
    def __init__(self, model, loss, metrics, optimizer, config, train_loader, valid_loader=None, lr_scheduler=None):
        super().__init__(model, loss, metrics, optimizer, config)
        self.train_loader = train_loader
        self.valid_loader = valid_loader
        self.do_validation = self.valid_loader is not None
        self.lr_scheduler = lr_scheduler
        self.seen = 0

    def _backward(self, loss):
        if self.config.apex:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()

    def _train_epoch(self, epoch):
        self.model.train()
        total_loss = 0
        for batch_idx, (data, target) in enumerate(self.train_loader):
            data, target = data.to(self.device), target.to(self.device)

            self.optimizer.zero_grad()
            output = self.model(data)
            loss = self.loss(output, target)
            self._backward(loss)
            self._clip()
            self.optimizer.step()

            total_loss += loss.item()
            print('step {} loss {}'.format(self.seen, loss.item()))
            self.seen += 1
        log = {'loss': total_loss / len(self.train_loader)}
        if self.do_validation:
            val_log = self._valid_epoch(epoch)
            log.update(**{'val_' + k: v for k, v in val_log.items()})
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return log

    def _clip(self):
        if self.config.clip:
            params = amp.master_params(self.optimizer) if self.config.apex else self.model.parameters()
            nn.utils.clip_grad_norm_(params, self.config.clip)

    def _valid_epoch(self, epoch):
        self.model.eval()
        total = 0
        with torch.no_grad():
            for data, target in self.valid_loader:
                data, target = data.to(self.device), target.to(self.device)
                output = self.model(data)
                total += self.loss(output, target).item()
                for met in self.metrics:
                    self.logger.debug('%s %f', met.__name__, met(output, target))
        return {'loss': total / len(self.valid_loader)}


class MnistModel(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=3)
        self.conv2 = nn.Conv2d(6, 8, kernel_size=3)
        self.conv2_drop = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(8 * 4 * 4, num_classes)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2_drop(self.conv2(x)))
        x = x.view(-1, 8 * 4 * 4)
        return torch.log_softmax(self.fc1(x), dim=1)


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(dim=1) == target).float().mean().item()


def main(config):
    torch.manual_seed(123)
    y = torch.randint(0, 3, (80,))
    x = torch.randn(3, 1, 8, 8)[y] + torch.randn(80, 1, 8, 8) * 0.7
    train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
    valid_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)

    model = MnistModel()
    trainable_params = filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.SGD(trainable_params, lr=0.2, momentum=0.5)
    trainer = Trainer(model, nn.functional.nll_loss, [accuracy], optimizer, config,
                      train_loader=train_loader, valid_loader=valid_loader,
                      lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    trainer.train()


if __name__ == '__main__':
    main(SimpleNamespace(apex=True, epochs=2, clip=0.4))
