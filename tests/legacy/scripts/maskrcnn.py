import json
import os

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from apex import amp

# the benchmark's own C extension in the original: _C.nms, _C.roi_align_forward
_C_distance = amp.float_function(torch._C._VariableFunctions.logsumexp)


class _ROIPool(Function):
    @staticmethod
    def forward(ctx, input, scale):
        ctx.scale, ctx.shape = scale, input.shape
        return input.mean(dim=(2, 3)) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        n, c, h, w = ctx.shape
        return (grad_output * ctx.scale / (h * w)).view(n, c, 1, 1).expand(n, c, h, w), None


roi_pool = _ROIPool.apply


class ROIPool(nn.Module):
    @amp.float_function
    def forward(self, input):
        assert input.dtype == torch.float32 or not amp._amp_state.opt_properties.patch_torch_functions
        return roi_pool(input, 2.0)


class RCNN(nn.Module):
    def __init__(self):
        super(RCNN, self).__init__()
        self.backbone = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = ROIPool()
        self.box = nn.Linear(8, 4)
        self.anchors = nn.Parameter(torch.randn(5, 4))

    def forward(self, images, targets):
        boxes = self.box(self.pool(torch.relu(self.backbone(images))).to(self.box.weight.dtype))
        distance = _C_distance(boxes @ self.anchors.t(), 1)
        assert distance.dtype == torch.float32 or not amp._amp_state.opt_properties.patch_torch_functions
        return {"loss_box": nn.functional.smooth_l1_loss(boxes.float(), targets), "loss_anchor": distance.float().mean() * 0.1}


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if distributed:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", init_method="env://")
    torch.manual_seed(0)
    model = RCNN().to(device)
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": 0.05 * (2 if "bias" in n else 1)} for n, p in model.named_parameters()], 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, (20,))
    use_mixed_precision = True
    amp_opt_level = 'O1' if use_mixed_precision else 'O0'
    model, optimizer = amp.initialize(model, optimizer, opt_level=amp_opt_level)
    if distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    for iteration in range(30):
        images = torch.rand(8, 3, 6, 6, device=device)
        targets = images.mean(dim=(2, 3))[:, [0, 1, 2, 0]] * 2
        scheduler.step()
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        with amp.scale_loss(losses, optimizer) as scaled_losses:
            scaled_losses.backward()
        optimizer.step()
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"step": iteration, "loss": losses.item()}))


if __name__ == "__main__":
    main()
