"""monai: a cached dataset with random transforms, UNet, sliding window, Dice."""

import monai
import torch
from monai.data import CacheDataset, DataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, RandFlip, ScaleIntensity

LIBRARIES = ("monai",)


def program():
    monai.utils.set_determinism(3)
    model = UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        channels=(4, 8),
        strides=(2,),
        num_res_units=1,
    ).cuda()
    optimizer, loss_of = (
        torch.optim.Adam(model.parameters()),
        DiceCELoss(to_onehot_y=True, softmax=True),
    )
    change = Compose([ScaleIntensity(), RandFlip(0.5, spatial_axis=1)])
    scans = CacheDataset(
        [torch.rand(1, 24, 24) for _ in range(6)], change, progress=False, num_workers=0
    )
    for on_host in DataLoader(scans, batch_size=3):
        scan = on_host.cuda()
        organ = (scan > 0.4).long() + (scan > 0.7).long()
        loss = loss_of(model(scan), organ)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        whole = sliding_window_inference(torch.rand(1, 1, 40, 40).cuda(), (24, 24), 2, model.eval())
        guess = [AsDiscrete(argmax=True, to_onehot=3)(one) for one in decollate_batch(model(scan))]
    score = DiceMetric(include_background=False)
    score(guess, [AsDiscrete(to_onehot=3)(one) for one in decollate_batch(organ)])
    value = score.aggregate()
    monai.utils.set_determinism(None)
    return model.state_dict(), torch.as_tensor(whole), value, loss
