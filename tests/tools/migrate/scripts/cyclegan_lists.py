"""CycleGAN-like: a model object with networks and optimizers kept in lists."""
import itertools
import random
from collections import OrderedDict

import torch
import torch.nn as nn

try:
    from apex import amp
except ImportError as error:
    print(error)


class Options(object):
    lr = 0.2
    beta1 = 0.5
    lambda_A = 0.5
    lambda_identity = 0.2
    pool_size = 4
    apex = True
    opt_level = 'O1'
    gpu_ids = []


class ImagePool():
    def __init__(self, pool_size):
        self.pool_size = pool_size
        self.images = []

    def query(self, images):
        if self.pool_size == 0:
            return images
        return_images = []
        for image in images:
            image = torch.unsqueeze(image.data, 0)
            if len(self.images) < self.pool_size:
                self.images.append(image)
                return_images.append(image)
            else:
                if random.uniform(0, 1) > 0.5:
                    random_id = random.randint(0, self.pool_size - 1)
                    tmp = self.images[random_id].clone()
                    self.images[random_id] = image
                    return_images.append(tmp)
                else:
                    return_images.append(image)
        return torch.cat(return_images, 0)


class GANLoss(nn.Module):
    def __init__(self, weight=0.2):
        super().__init__()
        self.weight = weight
        self.register_buffer('real_label', torch.tensor(1.0))
        self.register_buffer('fake_label', torch.tensor(0.0))
        self.loss = nn.MSELoss()

    def __call__(self, prediction, target_is_real):
        target = self.real_label if target_is_real else self.fake_label
        return self.weight * self.loss(prediction, target.expand_as(prediction))


def define_G(n=8):
    return nn.Sequential(nn.Linear(n, 24), nn.ReLU(True), nn.Linear(24, n), nn.Tanh())


def define_D(n=8):
    return nn.Sequential(nn.Linear(n, 24), nn.LeakyReLU(0.2, True), nn.Linear(24, 1))


class CycleGANModel():
    def __init__(self, opt):
        self.opt = opt
        self.device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')
        self.loss_names = ['D_A', 'G_A', 'cycle_A', 'idt_A', 'D_B', 'G_B', 'cycle_B', 'idt_B']
        self.model_names = ['G_A', 'G_B', 'D_A', 'D_B']
        self.netG_A = define_G().to(self.device)
        self.netG_B = define_G().to(self.device)
        self.netD_A = define_D().to(self.device)
        self.netD_B = define_D().to(self.device)
        self.fake_A_pool = ImagePool(opt.pool_size)
        self.fake_B_pool = ImagePool(opt.pool_size)
        self.criterionGAN = GANLoss().to(self.device)
        self.criterionCycle = torch.nn.L1Loss()
        self.criterionIdt = torch.nn.L1Loss()
        self.optimizer_G = torch.optim.SGD(itertools.chain(self.netG_A.parameters(), self.netG_B.parameters()), lr=opt.lr)
        self.optimizer_D = torch.optim.SGD(itertools.chain(self.netD_A.parameters(), self.netD_B.parameters()), lr=opt.lr)
        self.optimizers = []
        self.optimizers.append(self.optimizer_G)
        self.optimizers.append(self.optimizer_D)

        if opt.apex:
            [self.netG_A, self.netG_B, self.netD_A, self.netD_B], [self.optimizer_G, self.optimizer_D] = amp.initialize(
                [self.netG_A, self.netG_B, self.netD_A, self.netD_B], [self.optimizer_G, self.optimizer_D],
                opt_level=opt.opt_level, num_losses=3)

        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=6, gamma=0.5) for o in self.optimizers]

    def set_input(self, input):
        self.real_A = input['A'].to(self.device)
        self.real_B = input['B'].to(self.device)

    def forward(self):
        self.fake_B = self.netG_A(self.real_A)  # G_A(A)
        self.rec_A = self.netG_B(self.fake_B)   # G_B(G_A(A))
        self.fake_A = self.netG_B(self.real_B)  # G_B(B)
        self.rec_B = self.netG_A(self.fake_A)   # G_A(G_B(B))

    def backward_D_basic(self, netD, real, fake, loss_id):
        pred_real = netD(real)
        loss_D_real = self.criterionGAN(pred_real, True)
        pred_fake = netD(fake.detach())
        loss_D_fake = self.criterionGAN(pred_fake, False)
        loss_D = (loss_D_real + loss_D_fake) * 0.5
        if self.opt.apex:
            with amp.scale_loss(loss_D, self.optimizer_D, loss_id=loss_id) as loss_D_scaled:
                loss_D_scaled.backward()
        else:
            loss_D.backward()
        return loss_D

    def backward_D_A(self):
        fake_B = self.fake_B_pool.query(self.fake_B)
        self.loss_D_A = self.backward_D_basic(self.netD_A, self.real_B, fake_B, 1)

    def backward_D_B(self):
        fake_A = self.fake_A_pool.query(self.fake_A)
        self.loss_D_B = self.backward_D_basic(self.netD_B, self.real_A, fake_A, 2)

    def backward_G(self):
        lambda_idt = self.opt.lambda_identity
        if lambda_idt > 0:
            self.idt_A = self.netG_A(self.real_B)
            self.loss_idt_A = self.criterionIdt(self.idt_A, self.real_B) * lambda_idt
            self.idt_B = self.netG_B(self.real_A)
            self.loss_idt_B = self.criterionIdt(self.idt_B, self.real_A) * lambda_idt
        else:
            self.loss_idt_A = 0
            self.loss_idt_B = 0
        self.loss_G_A = self.criterionGAN(self.netD_A(self.fake_B), True)
        self.loss_G_B = self.criterionGAN(self.netD_B(self.fake_A), True)
        self.loss_cycle_A = self.criterionCycle(self.rec_A, self.real_A) * self.opt.lambda_A
        self.loss_cycle_B = self.criterionCycle(self.rec_B, self.real_B) * self.opt.lambda_A
        self.loss_G = self.loss_G_A + self.loss_G_B + self.loss_cycle_A + self.loss_cycle_B + self.loss_idt_A + self.loss_idt_B
        if self.opt.apex:
            with amp.scale_loss(self.loss_G, self.optimizer_G, loss_id=0) as loss_G_scaled:
                loss_G_scaled.backward()
        else:
            self.loss_G.backward()

    def set_requires_grad(self, nets, requires_grad=False):
        if not isinstance(nets, list):
            nets = [nets]
        for net in nets:
            if net is not None:
                for param in net.parameters():
                    param.requires_grad = requires_grad

    def optimize_parameters(self):
        self.forward()
        # G_A and G_B
        self.set_requires_grad([self.netD_A, self.netD_B], False)
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()
        # D_A and D_B
        self.set_requires_grad([self.netD_A, self.netD_B], True)
        self.optimizer_D.zero_grad()
        self.backward_D_A()
        self.backward_D_B()
        self.optimizer_D.step()

    def update_learning_rate(self):
        for scheduler in self.schedulers:
            scheduler.step()

    def get_current_losses(self):
        errors_ret = OrderedDict()
        for name in self.loss_names:
            errors_ret[name] = float(getattr(self, 'loss_' + name))
        return errors_ret


if __name__ == '__main__':
    random.seed(0)
    torch.manual_seed(0)
    model = CycleGANModel(Options())
    mix = torch.randn(8, 8)
    for total_iters in range(12):
        a = torch.tanh(torch.randn(8, 8))
        b = torch.tanh(torch.randn(8, 8) @ mix)
        model.set_input({'A': a, 'B': b})
        model.optimize_parameters()
        model.update_learning_rate()
        errors = model.get_current_losses()
        print('step', total_iters, 'loss', float(model.loss_G), 'd_a', errors['D_A'], 'd_b', errors['D_B'])
