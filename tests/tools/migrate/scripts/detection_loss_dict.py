"""maskrcnn-benchmark / torchvision references style: the model returns a dict of losses in training"""
import datetime
import logging
import time
from collections import defaultdict, deque

import torch
from torch import nn
from torch.nn import functional as F

try:
    from apex import amp
except ImportError:
    raise ImportError('Use APEX for multi-precision via apex.amp')


class SmoothedValue(object):
    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0

    def update(self, value):
        self.deque.append(value)
        self.count += 1
        self.total += value

    @property
    def median(self):
        d = torch.tensor(list(self.deque))
        return d.median().item()


class MetricLogger(object):
    def __init__(self, delimiter="\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters[k].update(v)


class RPNHead(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.cls_logits = nn.Conv2d(c, 1, 1)
        self.bbox_pred = nn.Conv2d(c, 4, 1)

    def forward(self, x):
        t = F.relu(self.conv(x))
        return self.cls_logits(t), self.bbox_pred(t)


class GeneralizedRCNN(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.backbone = nn.Conv2d(3, cfg['channels'], 3, padding=1)
        self.rpn = RPNHead(cfg['channels'])

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("In training mode, targets should be passed")
        features = F.relu(self.backbone(torch.stack(images)))
        objectness, boxes = self.rpn(features)
        if self.training:
            obj = torch.stack([t['objectness'] for t in targets])
            reg = torch.stack([t['boxes'] for t in targets])
            return {
                'loss_objectness': F.binary_cross_entropy_with_logits(objectness.squeeze(1), obj),
                'loss_rpn_box_reg': F.smooth_l1_loss(boxes, reg),
            }
        return [{'scores': o.sigmoid(), 'boxes': b} for o, b in zip(objectness, boxes)]


def make_optimizer(cfg, model):
    params = []
    for key, value in model.named_parameters():
        if not value.requires_grad:
            continue
        lr = cfg['lr']
        weight_decay = 0.0005
        if "bias" in key:
            lr = cfg['lr'] * 2
            weight_decay = 0
        params += [{"params": [value], "lr": lr, "weight_decay": weight_decay}]
    return torch.optim.SGD(params, cfg['lr'], momentum=0.9)


def reduce_loss_dict(loss_dict):
    return loss_dict  # one process


def sample(g, device):
    images, targets = [], []
    for _ in range(4):
        image = torch.randn(3, 6, 6, generator=g)
        blur = F.avg_pool2d(image[None], 3, 1, 1)[0]
        images.append(image.to(device))
        targets.append({'objectness': (blur[0] > 0.1).float().to(device),
                        'boxes': torch.cat([blur, blur[:1]]).to(device)})
    return images, targets


def do_train(model, data_loader, optimizer, scheduler, device, arguments):
    logger = logging.getLogger("maskrcnn_benchmark.trainer")
    logger.info("Start training")
    meters = MetricLogger(delimiter="  ")
    max_iter = len(data_loader)
    start_iter = arguments["iteration"]
    model.train()
    start_training_time = time.time()
    end = time.time()
    for iteration, (images, targets) in enumerate(data_loader, start_iter):
        iteration = iteration + 1
        arguments["iteration"] = iteration

        images = [image.to(device) for image in images]
        loss_dict = model(images, targets)

        losses = sum(loss for loss in loss_dict.values())

        # reduce losses over all GPUs for logging purposes
        loss_dict_reduced = reduce_loss_dict(loss_dict)
        losses_reduced = sum(loss for loss in loss_dict_reduced.values())
        meters.update(loss=losses_reduced, **loss_dict_reduced)

        optimizer.zero_grad()
        # Note: If mixed precision is not used, this ends up doing nothing
        # Otherwise apply loss scaling for mixed-precision recipe
        with amp.scale_loss(losses, optimizer) as scaled_losses:
            scaled_losses.backward()
        optimizer.step()
        scheduler.step()

        batch_time = time.time() - end
        end = time.time()
        meters.update(time=batch_time)
        print('step', iteration - 1, 'loss', losses_reduced.item(),
              *sum(([k, v.item()] for k, v in loss_dict_reduced.items()), []))
        if iteration == max_iter:
            logger.info("median loss %.4f", meters.meters['loss'].median)
    total_time_str = str(datetime.timedelta(seconds=time.time() - start_training_time))
    logger.info("Total training time: {}".format(total_time_str))


def inference(model, images):
    model.eval()
    with torch.no_grad():
        output = model(images)
        output = [{k: v.to('cpu') for k, v in o.items()} for o in output]
    return torch.stack([o['scores'].float() for o in output]).mean().item()


def main(cfg):
    torch.manual_seed(cfg['seed'])
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model = GeneralizedRCNN(cfg)
    model.to(device)
    optimizer = make_optimizer(cfg, model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], gamma=0.1)

    # Initialize mixed-precision training
    use_mixed_precision = cfg['dtype'] == "float16"
    amp_opt_level = 'O1' if use_mixed_precision else 'O0'
    model, optimizer = amp.initialize(model, optimizer, opt_level=amp_opt_level)

    g = torch.Generator().manual_seed(1)
    data_loader = [sample(g, device) for _ in range(cfg['max_iter'])]
    do_train(model, data_loader, optimizer, scheduler, device, {"iteration": 0})
    print('eval', 0, 'score', inference(model, data_loader[0][0]))


if __name__ == "__main__":
    main(dict(channels=8, lr=0.2, seed=44, dtype="float16", max_iter=15))
