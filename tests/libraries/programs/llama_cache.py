"""transformers: Llama and Qwen2; padded batches, static and dynamic caches, bfloat16."""

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

LIBRARIES = ("transformers",)
SIZES = {
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
}


def program():
    llama = LlamaForCausalLM(
        LlamaConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, **SIZES)
    ).cuda()
    tokens = torch.randint(3, 100, (2, 9), device="cuda")
    tokens[1, :2] = 0
    seen = (tokens != 0).long()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    for _ in range(2):
        labels = tokens.masked_fill(seen == 0, -100)
        llama(input_ids=tokens, attention_mask=seen, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    llama.eval()
    made = [
        llama.generate(tokens, attention_mask=seen, max_new_tokens=5, **way)
        for way in (
            {"do_sample": False},
            {"do_sample": True, "top_k": 12, "repetition_penalty": 1.1, "num_return_sequences": 2},
            {"do_sample": False, "cache_implementation": "static"},
        )
    ]
    kept, step = DynamicCache(config=llama.config), tokens[:1]
    with torch.no_grad():
        for _ in range(4):
            step = (
                llama(input_ids=step, past_key_values=kept, use_cache=True)
                .logits[:, -1:]
                .argmax(-1)
            )
            made.append(step)
    qwen = Qwen2ForCausalLM(Qwen2Config(**SIZES)).to("cuda", torch.bfloat16).eval()
    made.append(qwen.generate(tokens[:1], max_new_tokens=4, do_sample=False, pad_token_id=0))
    return llama.state_dict(), made
