"""timm: ViT and ResNet with Mixup, drop path, a moving average and a schedule."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, accuracy

LIBRARIES = ("timm",)


def program():
    vit = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=16,
        depth=1,
        num_classes=6,
        drop_path_rate=0.1,
    ).cuda()
    resnet = timm.create_model("resnet10t", num_classes=6).cuda()
    mix = Mixup(mixup_alpha=0.5, cutmix_alpha=1.0, num_classes=6)
    loss_of, losses = SoftTargetCrossEntropy(), []
    for model in (vit, resnet):
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
        schedule = CosineLRScheduler(optimizer, t_initial=5, warmup_t=1)
        average = ModelEmaV3(model, decay=0.8)
        for step in range(2):
            images = torch.randn(4, 3, 32, 32, device="cuda")
            kinds = torch.randint(0, 6, (4,), device="cuda")
            mixed, shares = mix(images, kinds)
            loss = loss_of(model(mixed), shares)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(model)
            schedule.step(step)
            losses.append(loss)
    with torch.no_grad():
        scores = vit.eval()(images)
    first, _ = accuracy(scores, kinds, topk=(1, 3))
    maps = timm.create_model("resnet10t", features_only=True).cuda().eval()(images)
    return vit.state_dict(), resnet.state_dict(), average.module.state_dict(), losses, first, maps
