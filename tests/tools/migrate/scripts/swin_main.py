# --------------------------------------------------------
# Swin-style training script
# --------------------------------------------------------

import os
import time
import argparse
import datetime
import tempfile
import logging
import numpy as np

import torch
import torch.nn as nn
import torch.backends.cudnn as cudnn

try:
    # noinspection PyUnresolvedReferences
    from apex import amp
except ImportError:
    amp = None


class AttrDict(dict):
    def __getattr__(self, k):
        return self[k]


class AverageMeter:
    def __init__(self):
        self.val = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def parse_option():
    parser = argparse.ArgumentParser('Swin Transformer training and evaluation script', add_help=False)
    parser.add_argument('--accumulation-steps', type=int, default=2, help="gradient accumulation steps")
    parser.add_argument('--amp-opt-level', type=str, default='O1', choices=['O0', 'O1', 'O2'],
                        help='mixed precision opt level, if O0, no amp is used')
    parser.add_argument('--resume', default='')
    parser.add_argument('--output', default=None)
    args, unparsed = parser.parse_known_args()
    config = AttrDict(
        AMP_OPT_LEVEL=args.amp_opt_level,
        OUTPUT=args.output or tempfile.mkdtemp(),
        TRAIN=AttrDict(EPOCHS=2, ACCUMULATION_STEPS=args.accumulation_steps, CLIP_GRAD=0.5, BASE_LR=0.2,
                       AUTO_RESUME=False),
        MODEL=AttrDict(RESUME=args.resume, LABEL_SMOOTHING=0.1),
        PRINT_FREQ=1, SEED=0,
    )
    return args, config


class WindowBlock(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 2), nn.GELU(), nn.Linear(dim * 2, dim))
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.relative_position_bias = nn.Parameter(torch.zeros(heads, 4, 4))

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * self.scale
        attn = (q @ k.transpose(-2, -1)) + self.relative_position_bias.unsqueeze(0)
        attn = attn.softmax(dim=-1)
        x = x + self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
        return x + self.mlp(self.norm2(x))


class SwinTiny(nn.Module):
    def __init__(self, num_classes=4, dim=16):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList([WindowBlock(dim) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    @torch.jit.ignore
    def no_weight_decay(self):
        return {'relative_position_bias'}

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x).mean(1))


def build_loader(config):
    g = torch.Generator().manual_seed(config.SEED)
    y = torch.randint(0, 4, (64,), generator=g)
    protos = torch.randn(4, 3, 8, 8, generator=g)
    x = protos[y] + 0.5 * torch.randn(64, 3, 8, 8, generator=g)
    train = torch.utils.data.TensorDataset(x[:48], y[:48])
    val = torch.utils.data.TensorDataset(x[48:], y[48:])
    return (torch.utils.data.DataLoader(train, 8, shuffle=True), torch.utils.data.DataLoader(val, 8))


def main(config):
    data_loader_train, data_loader_val = build_loader(config)

    logger.info("Creating model")
    model = SwinTiny()
    model.to(device)
    logger.info(str(model))

    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=config.TRAIN.BASE_LR)
    if config.AMP_OPT_LEVEL != "O0":
        model, optimizer = amp.initialize(model, optimizer, opt_level=config.AMP_OPT_LEVEL)
    model_without_ddp = model

    n_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logger.info(f"number of params: {n_parameters}")

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: 1.0 / (1 + 0.1 * it))
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=config.MODEL.LABEL_SMOOTHING)

    if config.MODEL.RESUME:
        load_checkpoint(config, model_without_ddp, optimizer, lr_scheduler)

    logger.info("Start training")
    start_time = time.time()
    for epoch in range(config.TRAIN.EPOCHS):
        train_one_epoch(config, model, criterion, data_loader_train, optimizer, epoch, lr_scheduler)
        save_checkpoint(config, epoch, model_without_ddp, 0., optimizer, lr_scheduler)
        acc1, loss = validate(config, data_loader_val, model)
        print(f"eval {epoch} loss {loss}")
        logger.info(f"Accuracy of the network on the test images: {acc1:.1f}%")

    total_time_str = str(datetime.timedelta(seconds=int(time.time() - start_time)))
    logger.info('Training time {}'.format(total_time_str))


def train_one_epoch(config, model, criterion, data_loader, optimizer, epoch, lr_scheduler):
    model.train()
    optimizer.zero_grad()

    num_steps = len(data_loader)
    batch_time = AverageMeter()
    loss_meter = AverageMeter()
    norm_meter = AverageMeter()

    end = time.time()
    for idx, (samples, targets) in enumerate(data_loader):
        samples = samples.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)

        outputs = model(samples)

        if config.TRAIN.ACCUMULATION_STEPS > 1:
            loss = criterion(outputs, targets)
            loss = loss / config.TRAIN.ACCUMULATION_STEPS
            if config.AMP_OPT_LEVEL != "O0":
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                if config.TRAIN.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), config.TRAIN.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(amp.master_params(optimizer))
            else:
                loss.backward()
                if config.TRAIN.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.TRAIN.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(model.parameters())
            if (idx + 1) % config.TRAIN.ACCUMULATION_STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
                lr_scheduler.step()
        else:
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            if config.AMP_OPT_LEVEL != "O0":
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                if config.TRAIN.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), config.TRAIN.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(amp.master_params(optimizer))
            else:
                loss.backward()
                if config.TRAIN.CLIP_GRAD:
                    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.TRAIN.CLIP_GRAD)
                else:
                    grad_norm = get_grad_norm(model.parameters())
            optimizer.step()
            lr_scheduler.step()

        loss_meter.update(loss.item(), targets.size(0))
        norm_meter.update(grad_norm)
        batch_time.update(time.time() - end)
        end = time.time()

        if idx % config.PRINT_FREQ == 0:
            lr = optimizer.param_groups[0]['lr']
            logger.info(f'Train: [{epoch}][{idx}/{num_steps}]\tlr {lr:.6f}\tgrad_norm {norm_meter.val:.4f}')
            print(f'step {epoch * num_steps + idx} loss {loss_meter.val}')


@torch.no_grad()
def validate(config, data_loader, model):
    criterion = torch.nn.CrossEntropyLoss()
    model.eval()

    loss_meter = AverageMeter()
    acc1_meter = AverageMeter()
    for idx, (images, target) in enumerate(data_loader):
        images = images.to(device)
        target = target.to(device)
        output = model(images)
        loss = criterion(output, target)
        loss_meter.update(loss.item(), target.size(0))
        acc1_meter.update(100. * (output.argmax(1) == target).float().mean().item(), target.size(0))
    return acc1_meter.avg, loss_meter.avg


def load_checkpoint(config, model, optimizer, lr_scheduler):
    checkpoint = torch.load(config.MODEL.RESUME, map_location='cpu', weights_only=False)
    model.load_state_dict(checkpoint['model'], strict=False)
    optimizer.load_state_dict(checkpoint['optimizer'])
    lr_scheduler.load_state_dict(checkpoint['lr_scheduler'])
    if 'amp' in checkpoint and config.AMP_OPT_LEVEL != "O0":
        amp.load_state_dict(checkpoint['amp'])


def save_checkpoint(config, epoch, model, max_accuracy, optimizer, lr_scheduler):
    save_state = {'model': model.state_dict(),
                  'optimizer': optimizer.state_dict(),
                  'lr_scheduler': lr_scheduler.state_dict(),
                  'max_accuracy': max_accuracy,
                  'epoch': epoch}
    if config.AMP_OPT_LEVEL != "O0":
        save_state['amp'] = amp.state_dict()
    save_path = os.path.join(config.OUTPUT, f'ckpt_epoch_{epoch}.pth')
    torch.save(save_state, save_path)
    logger.info(f"{save_path} saved !!!")


def get_grad_norm(parameters, norm_type=2):
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(filter(lambda p: p.grad is not None, parameters))
    norm_type = float(norm_type)
    total_norm = 0
    for p in parameters:
        param_norm = p.grad.data.norm(norm_type)
        total_norm += param_norm.item() ** norm_type
    total_norm = total_norm ** (1. / norm_type)
    return total_norm


if __name__ == '__main__':
    _, config = parse_option()

    if config.AMP_OPT_LEVEL != "O0":
        assert amp is not None, "amp not installed!"

    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.manual_seed(config.SEED)
    np.random.seed(config.SEED)
    cudnn.benchmark = True

    logger = logging.getLogger('swin')
    main(config)
