import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser(description='PyTorch ImageNet Training')
parser.add_argument('--lr', default=0.02, type=float)
parser.add_argument('--momentum', default=0.9, type=float)
parser.add_argument('--local_rank', default=os.getenv('LOCAL_RANK', 0), type=int)
parser.add_argument('--sync_bn', action='store_true', help='enabling apex sync BN.')
parser.add_argument('--opt-level', type=str, default='O1')
parser.add_argument('--keep-batchnorm-fp32', type=str, default=None)
parser.add_argument('--loss-scale', type=str, default=None)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(x.view(x.size(0), -1))


def adjust_learning_rate(optimizer, step):
    lr = args.lr * min(1., (step + 1) / 5.)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr


def main():
    args.distributed = False
    if 'WORLD_SIZE' in os.environ:
        args.distributed = int(os.environ['WORLD_SIZE']) > 1
    device = torch.device('cuda', args.local_rank) if torch.cuda.is_available() else torch.device('cpu')
    if args.distributed:
        torch.distributed.init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo', init_method='env://')
    torch.manual_seed(0)
    model = Net()
    if args.sync_bn:
        import apex
        model = apex.parallel.convert_syncbn_model(model)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.opt_level,
                                      keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                      loss_scale=args.loss_scale
                                      )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

    torch.manual_seed(1 + int(args.local_rank))
    model.train()
    for i in range(24):
        target = torch.randint(0, 4, (16,), device=device)
        input = torch.randn(16, 3, 8, 8, device=device) * 0.5 + target.view(-1, 1, 1, 1).float() / 2
        adjust_learning_rate(optimizer, i)
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if int(args.local_rank) == 0:
            print(json.dumps({'step': i, 'loss': to_python_float(loss.data)}))


if __name__ == '__main__':
    main()
