"""transformers: causal language model by Trainer; greedy, sampled and beam search generation."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

LIBRARIES = ("transformers", "datasets", "tokenizers")


def program():
    words = ["<pad>", "<end>", "<other>", *(f"v{at}" for at in range(40))]
    raw = Tokenizer(models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="<other>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", unk_token="<other>"
    )
    texts = [" ".join(f"v{(3 * row + at) % 40}" for at in range(5 + row % 4)) for row in range(24)]
    rows = Dataset.from_dict({"text": texts}).map(
        lambda row: tokenizer(row["text"]), remove_columns=["text"]
    )
    shape = {"n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 24}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=1, **shape)
    )
    options = TrainingArguments(
        "out",
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, options, train_dataset=rows, data_collator=collator).train()
    start = tokenizer("v1 v2 v3", return_tensors="pt").to(model.device)
    ways = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 8, "top_p": 0.9, "temperature": 0.7},
        {"num_beams": 3, "do_sample": False},
    ]
    made = []
    for way in ways:
        torch.manual_seed(2)
        made.append(model.eval().generate(**start, max_new_tokens=6, pad_token_id=0, **way))
    return model.state_dict(), made
