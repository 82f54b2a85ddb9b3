"""torchvision: Faster R-CNN, RetinaNet, DeepLabV3 with an ignored border."""

import torch
import torchvision
from torch import nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

LIBRARIES = ("torchvision",)


def body():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
    layers.out_channels = 16
    return layers


def program():
    sizes = {"num_classes": 4, "min_size": 48, "max_size": 72}
    anchors = AnchorGenerator(sizes=((16, 32),), aspect_ratios=((0.5, 1.0),))
    pool = torchvision.ops.MultiScaleRoIAlign(["0"], output_size=4, sampling_ratio=2)
    faster = FasterRCNN(
        body(),
        rpn_anchor_generator=anchors,
        box_roi_pool=pool,
        rpn_post_nms_top_n_train=20,
        rpn_post_nms_top_n_test=10,
        **sizes,
    ).cuda()
    retina = RetinaNet(
        body(), anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)), **sizes
    ).cuda()
    images = [torch.rand(3, 50, 60, device="cuda"), torch.rand(3, 48, 48, device="cuda")]
    targets = [
        {
            "boxes": torch.tensor([[4.0, 4, 30, 30], [8, 15, 40, 45]], device="cuda"),
            "labels": torch.tensor([1, 3], device="cuda"),
        },
        {
            "boxes": torch.tensor([[6.0, 6, 25, 25]], device="cuda"),
            "labels": torch.tensor([2], device="cuda"),
        },
    ]
    losses, found = [], []
    for model in (faster, retina):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            parts = model.train()(images, targets)
            optimizer.zero_grad()
            sum(parts.values()).backward()
            optimizer.step()
            losses.append(parts)
        with torch.no_grad():
            found.append(model.eval()(images))
    segment = deeplabv3_mobilenet_v3_large(weights_backbone=None, num_classes=4).cuda()
    mask = torch.randint(0, 4, (2, 48, 48), device="cuda")
    mask[:, :2] = 255
    scores = segment(torch.rand(2, 3, 48, 48, device="cuda"))["out"]
    nn.functional.cross_entropy(scores, mask, ignore_index=255).backward()
    gradients = [item.grad for item in segment.parameters()]
    return faster.state_dict(), retina.state_dict(), losses, found, gradients
