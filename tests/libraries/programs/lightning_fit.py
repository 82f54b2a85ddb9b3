"""Lightning: fit in float16 with a metric, validation, prediction."""

import logging

import lightning
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

LIBRARIES = ("lightning", "torchmetrics")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(10, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)
        )
        self.right = torchmetrics.classification.MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, number):
        features, kind = batch
        scores = self.body(features)
        self.right(scores, kind)
        self.log("right", self.right)
        return F.cross_entropy(scores, kind)

    def validation_step(self, batch, number):
        self.log("loss", F.cross_entropy(self.body(batch[0]), batch[1]))

    def predict_step(self, batch, number):
        return self.body(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def program():
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    lightning.seed_everything(2, verbose=False)
    rows = torch.utils.data.TensorDataset(torch.randn(30, 10), torch.randint(0, 3, (30,)))
    loader = torch.utils.data.DataLoader(rows, batch_size=6)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, loader)
    loss = trainer.validate(model, loader, verbose=False)[0]["loss"]
    return model.state_dict(), loss, trainer.predict(model, loader)
