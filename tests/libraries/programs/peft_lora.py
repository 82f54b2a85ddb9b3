"""peft: LoRA under autocast with a GradScaler; saved, loaded, merged."""

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LIBRARIES = ("peft", "transformers")


def program():
    config = LlamaConfig(
        vocab_size=70,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    adapter = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
    )
    model = get_peft_model(LlamaForCausalLM(config), adapter).cuda()
    trained = [item for item in model.parameters() if item.requires_grad]
    optimizer, scaler = torch.optim.AdamW(trained, lr=1e-3), torch.amp.GradScaler("cuda")
    for _ in range(3):
        tokens = torch.randint(1, 70, (3, 10), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model.save_pretrained("adapter")
    again = PeftModel.from_pretrained(LlamaForCausalLM(config), "adapter").cuda().eval()
    merged = model.merge_and_unload().eval()
    made = merged.generate(tokens[:1, :3], max_new_tokens=4, do_sample=False)
    return merged.state_dict(), again.state_dict(), made, loss
