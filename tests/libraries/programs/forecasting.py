"""pytorch-forecasting: a temporal fusion transformer of three series, fitted by Lightning."""

import logging

import lightning
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import (
    GroupNormalizer,
    QuantileLoss,
    TemporalFusionTransformer,
    TimeSeriesDataSet,
)

LIBRARIES = ("pytorch-forecasting", "lightning")


def program():
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    lightning.seed_everything(3, verbose=False)
    rows = [
        {
            "shop": str(shop),
            "day": day,
            "sold": float(np.cos(day / 4 + shop) + 3),
            "week": str(day % 7),
        }
        for shop in range(3)
        for day in range(30)
    ]
    days = TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="day",
        target="sold",
        group_ids=["shop"],
        max_encoder_length=8,
        max_prediction_length=3,
        static_categoricals=["shop"],
        time_varying_known_reals=["day"],
        time_varying_known_categoricals=["week"],
        time_varying_unknown_reals=["sold"],
        target_normalizer=GroupNormalizer(groups=["shop"]),
        add_relative_time_idx=True,
    )
    model = TemporalFusionTransformer.from_dataset(
        days,
        hidden_size=8,
        attention_head_size=1,
        hidden_continuous_size=4,
        loss=QuantileLoss(),
        log_interval=-1,
    )
    quiet = {"accelerator": "gpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=2,
        enable_model_summary=False,
        enable_checkpointing=False,
        gradient_clip_val=0.1,
        **quiet,
    )
    trainer.fit(model, days.to_dataloader(train=True, batch_size=12, num_workers=0))
    later = days.to_dataloader(train=False, batch_size=24, num_workers=0)
    return model.state_dict(), torch.as_tensor(model.predict(later, trainer_kwargs=quiet))
