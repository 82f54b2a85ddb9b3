"""transformers: speech recognition: features of a wave, training, generation."""

import numpy as np
import torch
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

LIBRARIES = ("transformers",)


def program():
    listen = WhisperFeatureExtractor(feature_size=12, chunk_length=1, n_fft=400)
    waves = list(np.random.RandomState(1).randn(3, 16000).astype("float32"))
    heard = listen(waves, sampling_rate=16000, return_tensors="pt").input_features.cuda()
    half = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
    sizes = {f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in half.items()}
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=60,
            num_mel_bins=12,
            d_model=16,
            max_source_positions=50,
            max_target_positions=24,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **sizes,
        )
    ).cuda()
    labels = torch.randint(4, 60, (3, 7), device="cuda")
    labels[1, 5:] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = model(input_features=heard, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.generation_config.max_length = 10
    return model.state_dict(), loss, model.generate(heard, max_new_tokens=6, do_sample=False)
