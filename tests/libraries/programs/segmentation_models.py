"""segmentation-models-pytorch: Unet and FPN, three losses, an ignored border, metrics."""

import segmentation_models_pytorch as smp
import torch

LIBRARIES = ("segmentation-models-pytorch",)


def program():
    unet = smp.Unet("resnet18", encoder_weights=None, classes=3).cuda()
    fpn = smp.FPN("mobilenet_v2", encoder_weights=None, classes=1).cuda()
    losses = [
        kind(mode="multiclass", ignore_index=255)
        for kind in (smp.losses.DiceLoss, smp.losses.FocalLoss)
    ]
    overlap = smp.losses.JaccardLoss(mode="binary")
    optimizer = torch.optim.Adam([*unet.parameters(), *fpn.parameters()], lr=1e-3)
    for _ in range(2):
        images = torch.rand(2, 3, 32, 32, device="cuda")
        mask = torch.randint(0, 3, (2, 32, 32), device="cuda")
        mask[:, :, :2] = 255
        scores = unet(images)
        loss = sum(item(scores, mask) for item in losses)
        loss = loss + overlap(fpn(images), (mask == 2).float()[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    counts = smp.metrics.get_stats(
        scores.argmax(1), mask, mode="multiclass", num_classes=3, ignore_index=255
    )
    return (
        unet.state_dict(),
        fpn.state_dict(),
        loss,
        counts,
        smp.metrics.iou_score(*counts, reduction="macro"),
    )
