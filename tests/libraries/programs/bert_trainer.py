"""transformers: Trainer, text classification, evaluation."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

LIBRARIES = ("transformers", "accelerate")


class Reviews(torch.utils.data.Dataset):
    def __init__(self, count):
        source = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(4, 90, (count, 12), generator=source)
        self.stars = torch.randint(0, 4, (count,), generator=source)

    def __len__(self):
        return len(self.stars)

    def __getitem__(self, at):
        return {
            "input_ids": self.tokens[at],
            "attention_mask": torch.ones_like(self.tokens[at]),
            "labels": self.stars[at],
        }


def share_right(given):
    return {"right": float((given.predictions.argmax(-1) == given.label_ids).mean())}


def program():
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = BertConfig(vocab_size=90, intermediate_size=32, num_labels=4, **shape)
    model = BertForSequenceClassification(config)
    options = TrainingArguments(
        "out",
        max_steps=3,
        per_device_train_batch_size=6,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
    )
    trainer = Trainer(
        model,
        options,
        train_dataset=Reviews(24),
        eval_dataset=Reviews(6),
        compute_metrics=share_right,
    )
    trainer.train()
    scores = trainer.evaluate()
    return model.state_dict(), scores["eval_loss"], scores["eval_right"]
