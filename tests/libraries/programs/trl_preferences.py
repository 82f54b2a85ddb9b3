"""trl: supervised fine-tuning, then direct preference optimization."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

LIBRARIES = ("trl", "transformers", "datasets")
QUIET = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
}


def program():
    words = ["<pad>", "<begin>", "<end>", "<other>", *(f"v{at}" for at in range(40))]
    raw = Tokenizer(models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="<other>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        unk_token="<other>",
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=48,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    said = [" ".join(f"v{(7 * row + at) % 40}" for at in range(6)) for row in range(12)]
    SFTTrainer(
        model,
        SFTConfig("tuned", max_length=16, **QUIET),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": said}),
    ).train()
    reference.load_state_dict(model.state_dict())
    liked = Dataset.from_dict(
        {"prompt": said, "chosen": said[1:] + said[:1], "rejected": said[2:] + said[:2]}
    )
    DPOTrainer(
        model,
        reference,
        DPOConfig("preferred", **QUIET),
        processing_class=tokenizer,
        train_dataset=liked,
    ).train()
    assert next(model.parameters()).is_cuda
    return model.state_dict()
