"""transformers: image classification with checkpoints, the best one loaded at the end."""

import numpy as np
import torch
from PIL import Image
from transformers import (
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

LIBRARIES = ("transformers", "accelerate")


def stacked(rows):
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def program():
    source = np.random.RandomState(3)
    shrink = ViTImageProcessor(size={"height": 24, "width": 24})
    rows = []
    for at in range(12):
        image = Image.fromarray(source.randint(0, 255, (30, 26, 3), dtype=np.uint8))
        pixels = shrink(image, return_tensors="pt")["pixel_values"][0]
        rows.append({"pixel_values": pixels, "labels": at % 3})
    model = ViTForImageClassification(
        ViTConfig(
            image_size=24,
            patch_size=8,
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=32,
            num_labels=3,
        )
    )
    options = TrainingArguments(
        "out",
        max_steps=4,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model, options, data_collator=stacked, train_dataset=rows, eval_dataset=rows[:4]
    )
    trainer.train()
    return model.state_dict(), trainer.predict(rows[:4]).predictions
