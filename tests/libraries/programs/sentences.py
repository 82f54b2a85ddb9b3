"""sentence-transformers: contrastive training, encoding, search."""

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
    util,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

LIBRARIES = ("sentence-transformers", "transformers")


def program():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"v{at}" for at in range(40))]
    table = {word: at for at, word in enumerate(words)}
    raw = Tokenizer(token_models.WordLevel(table, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=16,
    ).save_pretrained("small")
    BertModel(
        BertConfig(
            vocab_size=45,
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=32,
            max_position_embeddings=24,
        )
    ).save_pretrained("small")
    body = models.Transformer("small", max_seq_length=16)
    model = SentenceTransformer(modules=[body, models.Pooling(24, pooling_mode="mean")])
    said = [" ".join(f"v{(5 * row + at) % 40}" for at in range(5)) for row in range(16)]
    SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            "out",
            max_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"anchor": said, "positive": said[1:] + said[:1]}),
        loss=losses.MultipleNegativesRankingLoss(model),
    ).train()
    found = model.encode(said[:6], convert_to_tensor=True, show_progress_bar=False)
    assert found.is_cuda
    return model.state_dict(), found, util.semantic_search(found[:2], found, top_k=2)
