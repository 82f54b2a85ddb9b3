"""transformers: encoder-decoders; Seq2SeqTrainer with generated predictions, own loop, beams."""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

LIBRARIES = ("transformers", "accelerate")


def pairs(count):
    source = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        labels = torch.randint(4, 50, (6,), generator=source)
        labels[4:] = -100
        tokens = torch.randint(4, 50, (9,), generator=source)
        rows.append(
            {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        )
    return rows


def program():
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=50,
            d_model=24,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=3,
            decoder_start_token_id=0,
        )
    )
    options = Seq2SeqTrainingArguments(
        "out",
        max_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        predict_with_generate=True,
        generation_max_length=6,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Seq2SeqTrainer(t5, options, train_dataset=pairs(12), eval_dataset=pairs(4))
    trainer.train()
    predicted = trainer.predict(pairs(4)).predictions
    half = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
    sizes = {f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in half.items()}
    bart = BartForConditionalGeneration(
        BartConfig(vocab_size=50, d_model=16, max_position_embeddings=32, **sizes)
    ).to("cuda")
    optimizer = torch.optim.AdamW(bart.parameters(), lr=1e-3)
    rows = pairs(4)
    batch = {key: torch.stack([row[key] for row in rows]).cuda() for key in rows[0]}
    for _ in range(2):
        bart(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    summary = bart.eval().generate(
        batch["input_ids"], num_beams=2, max_length=8, no_repeat_ngram_size=2
    )
    return t5.state_dict(), predicted, bart.state_dict(), summary
