"""Train a small convolutional net on hand-written digits with apex.amp, as a repository of 2020 would have it.

Nothing in this file knows of ampcompat. Run it by

    ampcompat run docs/examples/digits.py --opt-level O2

An interrupted run goes on where its checkpoint stands, and ends with the same weights to the last bit:

    ampcompat run docs/examples/digits.py --opt-level O2 --checkpoint last.pt --checkpoint-every 10
    ampcompat run docs/examples/digits.py --opt-level O2 --checkpoint last.pt --resume last.pt
"""

import argparse
import json
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from digits_data import load_digits

try:
    from apex import amp
except ImportError:
    raise SystemExit("This script needs apex.amp. Run it by: ampcompat run docs/examples/digits.py") from None


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--loss-scale", type=str, default=None, help="a number or 'dynamic'")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None, help="'True' or 'False'")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", metavar="FILE", help="save the state of the run here, each time in one piece")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: at the end of each epoch")
    parser.add_argument("--resume", metavar="FILE", help="go on from this checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="leave after so many steps of the whole run")
    parser.add_argument("--result", metavar="FILE", help="write the figures of the run here, as JSON")
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.fc = nn.Linear(2 * width * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def save(path, **state):
    """Write to a file beside ``path``, then rename it: whoever is killed while saving leaves the last complete file."""
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    print(f"saved {path} in one piece, at step {state['step']}", flush=True)


@torch.no_grad()
def evaluate(model, images, labels):
    model.eval()
    correct = sum(
        (model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(200), labels.split(200), strict=True)
    )
    return 100.0 * correct / len(labels)


def main():
    args = parse_args()
    # The tensors are small: a second thread gains little on an idle CPU and loses much on a busy one.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    (train_x, train_y), (test_x, test_y) = [[t.to(args.device) for t in part] for part in load_digits()]

    model = Net().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    per_step = args.batch_size * args.accumulation
    steps_per_epoch = len(train_y) // per_step
    total_steps = args.epochs * steps_per_epoch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)

    step = skipped = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=args.device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        amp.load_state_dict(checkpoint["amp"])
        step, skipped = checkpoint["step"], checkpoint["skipped"]
        print(f"resumed {args.resume} at step {step}")

    loss_scaler = amp._amp_state.loss_scalers[0]
    last_step = min(total_steps, args.stop_after or total_steps)
    begin = time.perf_counter()
    while step < last_step:
        epoch, place = divmod(step, steps_per_epoch)
        # The order of an epoch depends on its number only, so that a resumed run sees the same batches.
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(1000 * args.seed + epoch))
        for rows in order.split(per_step)[place:steps_per_epoch]:
            model.train()
            scale, step_loss = loss_scaler.loss_scale(), 0.0
            batches = rows.to(args.device).split(args.batch_size)
            for i, batch in enumerate(batches):
                loss = F.cross_entropy(model(train_x[batch]), train_y[batch]) / args.accumulation
                with amp.scale_loss(loss, optimizer, delay_unscale=i + 1 < len(batches)) as scaled_loss:
                    scaled_loss.backward()
                step_loss += loss.item()
            skipped += loss_scaler.loss_scale() < scale
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if args.checkpoint and (step % (args.checkpoint_every or steps_per_epoch) == 0 or step == last_step):
                save(
                    args.checkpoint,
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    scheduler=scheduler.state_dict(),
                    amp=amp.state_dict(),
                    step=step,
                    skipped=skipped,
                )
            if step == last_step:
                break
        if step % steps_per_epoch == 0:
            accuracy = evaluate(model, test_x, test_y)
            print(
                f"epoch {step // steps_per_epoch:2d}  loss {step_loss:.4f}  test accuracy {accuracy:.2f} %", flush=True
            )

    result = {
        "opt_level": amp._amp_state.opt_properties.opt_level,
        "accuracy": evaluate(model, test_x, test_y),
        "steps": step,
        "skipped_steps": skipped,
        "loss_scale": loss_scaler.loss_scale(),
        "seconds": time.perf_counter() - begin,
        "weights": str(model.conv1.weight.dtype).replace("torch.", ""),
    }
    print(json.dumps(result))
    if args.result:
        with open(args.result, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
