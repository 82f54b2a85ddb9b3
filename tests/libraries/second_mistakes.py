# ruff: noqa: E501  the cells are as users write them
"""The second mistake that users of each library make, modelled on the threads of its tracker."""

from tests.libraries.mistakes import Mistake

_ENCODER = """
from sentence_transformers import SentenceTransformer, models, losses
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
import torch
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"v{at}" for at in range(40))]
raw = Tokenizer(token_models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", model_max_length=64).save_pretrained("small")
BertModel(BertConfig(vocab_size=45, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=32, max_position_embeddings=8)).save_pretrained("small")
"""
_TUNED = """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
words = ["<begin>", "<end>", "<other>", *(f"v{at}" for at in range(10))]
raw = Tokenizer(models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="<other>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<begin>", eos_token="<end>", unk_token="<other>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))
tokenizer.add_special_tokens({"pad_token": "<pad>"})
quiet = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False}
"""
_WHISPER = """
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
sizes = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
model = WhisperForConditionalGeneration(WhisperConfig(**sizes)).cuda()
sound = torch.randn(2, 8, 20, device="cuda")
"""

SECOND_MISTAKES = (
    Mistake(
        "accelerate_loop",
        "-1 for what is unlabelled, beside -100",
        """
import torch
from accelerate import Accelerator
from torch import nn
helper = Accelerator()
model = nn.Embedding(20, 5)
rows = [(torch.arange(at, at + 4), torch.tensor([at % 5, 2, -100, -1 if at == 6 else -100])) for at in range(8)]
model, loader = helper.prepare(model, torch.utils.data.DataLoader(rows, batch_size=4))
for words, tags in loader:
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten())
    helper.backward(loss)
""",
        "loss = nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten())",
        "tags.flatten()[11] = -1 is outside the 5 classes",
        "if -1 marks labels to leave out, make it -100",
    ),
    Mistake(
        "baselines",
        "an observation beyond its Discrete space",
        """
import gymnasium, numpy, torch
from stable_baselines3 import PPO
class Walk(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(4), gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        self.at = 0
        return self.at, {}
    def step(self, action):
        self.at += 1
        return self.at, 0.0, self.at == 5, False, {}
model = PPO("MlpPolicy", Walk(), n_steps=8, batch_size=4, device="cuda")
model.learn(8)
""",
        "model.learn(8)",
        "index[0, 0] = 4 is outside num_classes = 4",
        "4 earlier calls of the line had 0 … 3",
    ),
    Mistake(
        "diffusion",
        "a class beyond the class embedding",
        """
import torch
from diffusers import UNet2DModel
model = UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), num_class_embeds=10).cuda()
kinds = torch.tensor([3, 10], device="cuda")
noise = model(torch.randn(2, 3, 8, 8, device="cuda"), torch.tensor([5, 7], device="cuda"), class_labels=kinds).sample
""",
        'noise = model(torch.randn(2, 3, 8, 8, device="cuda"), torch.tensor([5, 7], device="cuda"), class_labels=kinds).sample',
        "kinds[1] = 10, but model.class_embedding (nn.Embedding) has 10 rows",
    ),
    Mistake(
        "forecasting",
        "an embedding for too few weekdays",
        """
import logging, lightning, pandas, torch
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
rows = pandas.DataFrame([{"shop": "a", "day": day, "sold": 1.0 + day % 3, "week": str(day % 7)} for day in range(30)])
days = TimeSeriesDataSet(rows, time_idx="day", target="sold", group_ids=["shop"], max_encoder_length=8, max_prediction_length=3, time_varying_known_categoricals=["week"], time_varying_unknown_reals=["sold"])
model = TemporalFusionTransformer.from_dataset(days, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, embedding_sizes={"week": (6, 3)}, log_interval=-1)
trainer = lightning.Trainer(max_steps=1, accelerator="gpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer.fit(model, days.to_dataloader(train=True, batch_size=12, num_workers=0))
""",
        "trainer.fit(model, days.to_dataloader(train=True, batch_size=12, num_workers=0))",
        "= 6, but model.input_embeddings.embeddings.week (nn.Embedding) has 6 rows",
        "they need 7 rows, there are 6",
    ),
    Mistake(
        "gaussian_processes",
        "labels from 0 in a Dirichlet likelihood, one unknown",
        """
import gpytorch, torch
kinds = torch.tensor([0, 2, -4, 1], device="cuda")
likelihood = gpytorch.likelihoods.DirichletClassificationLikelihood(kinds)
""",
        "likelihood = gpytorch.likelihoods.DirichletClassificationLikelihood(kinds)",
        "kinds[2] = -4 is outside dimension 1 (size 3)",
        "-4 is made here",
    ),
    Mistake(
        "layoutlm",
        "a tag beyond the head",
        """
import torch
from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification
model = LayoutLMv3ForTokenClassification(LayoutLMv3Config(vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, coordinate_size=4, shape_size=4, visual_embed=False, num_labels=4)).cuda()
words = torch.randint(4, 50, (1, 5), device="cuda")
boxes = torch.randint(0, 100, (1, 5, 4), device="cuda").sort(-1).values
tags = torch.tensor([[0, 3, 4, -100, -100]], device="cuda")
loss = model(input_ids=words, bbox=boxes, labels=tags).loss
""",
        "loss = model(input_ids=words, bbox=boxes, labels=tags).loss",
        "tags[0][2] = 4 is outside the 4 classes",
        "the model has num_labels=4",
    ),
    Mistake(
        "gpt2_generate",
        "a NaN in what the model is given",
        """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).cuda()
features = torch.rand(1, 4, 16)
features[0, 2, 3] = float("nan")
made = model.generate(inputs_embeds=features.cuda(), max_new_tokens=2, do_sample=True, pad_token_id=0)
""",
        "made = model.generate(inputs_embeds=features.cuda(), max_new_tokens=2, do_sample=True, pad_token_id=0)",
        "input[0, 0] = nan is not a number",
        "features contains NaN too (1 of ",
    ),
    Mistake(
        "llama_cache",
        "the labels are given as ids",
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)).cuda()
tokens = torch.tensor([[3, 4, 5, -100]], device="cuda")
loss = model(input_ids=tokens, labels=tokens).loss
""",
        "loss = model(input_ids=tokens, labels=tokens).loss",
        "tokens[0, 3] = -100, but model.model.embed_tokens (nn.Embedding) has 32 rows",
        "replace it with the padding id",
    ),
    Mistake(
        "llama_cache",
        "sampling from a model whose weights hold a NaN",
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)).cuda().eval()
with torch.no_grad():
    model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
tokens = torch.tensor([[3, 4, 5, 6]], device="cuda")
made = model.generate(tokens, do_sample=True, max_new_tokens=3, pad_token_id=0)
""",
        "made = model.generate(tokens, do_sample=True, max_new_tokens=3, pad_token_id=0)",
        "input[0, 0] = nan is not a number",
        "nan is written to model.model.layers.0.mlp.down_proj.weight here",
    ),
    Mistake(
        "metrics",
        "a label that the hinge loss has no class for",
        """
import torch
from torchmetrics.classification import MulticlassHingeLoss
score = MulticlassHingeLoss(3, validate_args=False).cuda()
truth = torch.tensor([0, 3, 2], device="cuda")
score.update(torch.rand(3, 3, device="cuda"), truth)
""",
        'score.update(torch.rand(3, 3, device="cuda"), truth)',
        "index[1, 0] = 3 is outside dimension 1 (size 3)",
        "one past the last (0 … 2)",
    ),
    Mistake(
        "metrics",
        "a word beyond the scores of a perplexity",
        """
import torch
from torchmetrics.text import Perplexity
score = Perplexity().cuda()
words = torch.tensor([[1, 7, 2]], device="cuda")
score.update(torch.randn(1, 3, 7, device="cuda").softmax(-1), words)
""",
        'score.update(torch.randn(1, 3, 7, device="cuda").softmax(-1), words)',
        "words[0][1] = 7 is outside dimension 1 (size 7)",
        "7 is made here",
    ),
    Mistake(
        "metrics",
        "a label that the confusion matrix has no row for",
        """
import torch
from torchmetrics.classification import MulticlassConfusionMatrix
score = MulticlassConfusionMatrix(3).cuda()
truth = torch.tensor([0, 3, 2], device="cuda")
score.update(torch.rand(3, 3, device="cuda"), truth)
""",
        'score.update(torch.rand(3, 3, device="cuda"), truth)',
        "truth[1] = 3 is outside the 3 classes of the matrix",
        "one past the last (0 … 2)",
    ),
    Mistake(
        "metrics",
        "a mask with 255 in an intersection over union",
        """
import torch
from torchmetrics import JaccardIndex
score = JaccardIndex(task="multiclass", num_classes=3).cuda()
mask = torch.randint(0, 3, (2, 8, 8), device="cuda")
mask[0, 0, :4] = 255
score.update(torch.randn(2, 3, 8, 8, device="cuda"), mask)
""",
        'score.update(torch.randn(2, 3, 8, 8, device="cuda"), mask)',
        "mask[0, 0, 0] = 255 is outside the 3 classes of the matrix",
        "allowed 0 … 2",
    ),
    Mistake(
        "metrics",
        "a mask with 255 in a mean intersection over union",
        """
import torch
from torchmetrics.segmentation import MeanIoU
score = MeanIoU(num_classes=3, input_format="index").cuda()
mask = torch.randint(0, 3, (2, 8, 8), device="cuda")
mask[0, 0, :4] = 255
score.update(torch.randint(0, 3, (2, 8, 8), device="cuda"), mask)
""",
        'score.update(torch.randint(0, 3, (2, 8, 8), device="cuda"), mask)',
        "mask[0, 0, 0] = 255 is outside num_classes = 3",
        "255 is not a class",
    ),
    Mistake(
        "monai_unet",
        "a border of 255 in a focal loss",
        """
import torch
from monai.losses import FocalLoss
organ = torch.randint(0, 2, (2, 1, 8, 8), device="cuda")
organ[:, :, 0] = 255
loss = FocalLoss(to_onehot_y=True)(torch.randn(2, 2, 8, 8, device="cuda"), organ)
""",
        'loss = FocalLoss(to_onehot_y=True)(torch.randn(2, 2, 8, 8, device="cuda"), organ)',
        "organ[0, 0, 0, 0] = 255 is outside dimension 1 (size 2)",
        "255 is not a class",
    ),
    Mistake(
        "peft_lora",
        "virtual tokens beyond the positions",
        """
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
base = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)).cuda()
ids = torch.randint(0, 40, (2, 12), device="cuda")
loss = model(input_ids=ids, labels=ids).loss
""",
        "loss = model(input_ids=ids, labels=ids).loss",
        "= 16, but model.base_model.transformer.wpe (nn.Embedding) has 16 rows",
        "ids brings 12 of them, and with the others at most 8 fit",
    ),
    Mistake(
        "recommending",
        "an item that the table has no row for",
        """
from tests.libraries.programs import recommending
import torch
from recbole.model.layers import TransformerEncoder
from torch import nn
items, body = nn.Embedding(30, 8, padding_idx=0).cuda(), TransformerEncoder(1, 2, 8, 16).cuda()
clicks = torch.tensor([[3, 9, 30], [4, 5, 0]], device="cuda")
found = body(items(clicks), torch.zeros(2, 1, 1, 3, device="cuda"))
""",
        'found = body(items(clicks), torch.zeros(2, 1, 1, 3, device="cuda"))',
        "clicks[0, 2] = 30, but items (nn.Embedding) has 30 rows",
        "30 is made here",
    ),
    Mistake(
        "recommending",
        "a history longer than the model's positions",
        """
import logging, sys
from pathlib import Path
from tests.libraries.programs import recommending
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.data.interaction import Interaction
from recbole.utils import get_model
sys.argv = ["program"]
Path("data/shop").mkdir(parents=True)
Path("data/shop/shop.inter").write_text("user_id:token\\titem_id:token\\ttimestamp:float\\n" + "".join(f"{u}\\t{(u * 3 + i) % 9}\\t{i}\\n" for u in range(4) for i in range(6)))
config = Config("SASRec", "shop", config_dict={"data_path": "data", "use_gpu": True, "gpu_id": "0", "hidden_size": 8, "inner_size": 16, "n_layers": 1, "MAX_ITEM_LIST_LENGTH": 4, "train_neg_sample_args": None, "load_col": {"inter": ["user_id", "item_id", "timestamp"]}})
shop = create_dataset(config)
train, valid, test = data_preparation(config, shop)
model = get_model("SASRec")(config, train.dataset).to("cuda")
history = Interaction({"item_id_list": torch.tensor([[1, 2, 3, 4, 5, 6]], device="cuda"), "item_length": torch.tensor([6], device="cuda"), "item_id": torch.tensor([3], device="cuda")})
loss = model.calculate_loss(history)
""",
        "loss = model.calculate_loss(history)",
        "indices[0, 4] = 4, but model.position_embedding (nn.Embedding) has 4 rows",
        "cut the input to 4",
    ),
    Mistake(
        "rl_losses",
        "an action beyond the head in a DQN loss",
        """
from tests.libraries.programs import rl_losses
import torch
from tensordict import TensorDict
from torchrl.data import Categorical
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss
kind = Categorical(3, device="cuda")
actor = QValueActor(MLP(in_features=3, out_features=3, num_cells=[8], device="cuda"), in_keys=["observation"], spec=kind)
loss_of = DQNLoss(actor, action_space="categorical")
ended = torch.zeros(4, 1, dtype=torch.bool, device="cuda")
later = {"observation": torch.randn(4, 3, device="cuda"), "reward": torch.ones(4, 1, device="cuda"), "done": ended, "terminated": ended}
steps = TensorDict({"observation": torch.randn(4, 3, device="cuda"), "action": torch.tensor([0, 1, 3, 2], device="cuda"), "next": later}, [4])
loss = loss_of(steps)["loss"]
""",
        'loss = loss_of(steps)["loss"]',
        "index[2, 0] = 3 is outside dimension 1 (size 3)",
        "3 is made here",
    ),
    Mistake(
        "segmentation_models",
        "an unlabelled -1 in a Jaccard loss",
        """
import segmentation_models_pytorch as smp
import torch
scores = torch.randn(1, 3, 8, 8, device="cuda")
mask = torch.randint(0, 3, (1, 8, 8), device="cuda")
mask[0, 3, 5] = -1
loss = smp.losses.JaccardLoss(mode="multiclass")(scores, mask)
""",
        'loss = smp.losses.JaccardLoss(mode="multiclass")(scores, mask)',
        "mask[0, 3, 5] = -1 is outside num_classes = 3",
        "-1 is made here",
    ),
    Mistake(
        "segmentation_models",
        "a mask with 255 in a cross entropy",
        """
import segmentation_models_pytorch as smp
import torch
model = smp.Unet("resnet18", encoder_weights=None, classes=3).cuda()
mask = torch.randint(0, 3, (2, 64, 64), device="cuda")
mask[0, :2] = 255
loss = smp.losses.SoftCrossEntropyLoss(smooth_factor=0.1)(model(torch.rand(2, 3, 64, 64, device="cuda")), mask)
""",
        'loss = smp.losses.SoftCrossEntropyLoss(smooth_factor=0.1)(model(torch.rand(2, 3, 64, 64, device="cuda")), mask)',
        "mask[0, 0, 0] = 255 is outside dimension 1 (size 3)",
        "model.segmentation_head[0] is made here (3 places)",
    ),
    Mistake(
        "sentences",
        "texts longer than the positions",
        _ENCODER
        + """
model = SentenceTransformer(modules=[models.Transformer("small", max_seq_length=16), models.Pooling(24)], device="cuda")
found = model.encode([" ".join(f"v{at}" for at in range(12))], show_progress_bar=False)
""",
        'found = model.encode([" ".join(f"v{at}" for at in range(12))], show_progress_bar=False)',
        "input_ids has 12 tokens, BertEmbeddings has positions for 8",
        "truncate to max_length=8",
    ),
    Mistake(
        "sentences",
        "three kinds of pairs, two in the head",
        _ENCODER
        + """
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
model = SentenceTransformer(modules=[models.Transformer("small", max_seq_length=8), models.Pooling(24)], device="cuda")
pairs = Dataset.from_dict({"one": ["v1 v2", "v3", "v4"], "other": ["v2", "v4", "v5 v6"], "label": [0, 1, 2]})
options = SentenceTransformerTrainingArguments("out", max_steps=1, per_device_train_batch_size=3, report_to=[], disable_tqdm=True, save_strategy="no")
trainer = SentenceTransformerTrainer(model, options, train_dataset=pairs, loss=losses.SoftmaxLoss(model, 24, num_labels=2))
trainer.train()
""",
        "trainer.train()",
        "= 2 is outside the 2 classes",
        "they need 3 outputs, there are 2",
    ),
    Mistake(
        "timm_train",
        "labels from 1 behind Mixup",
        """
import timm, torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
model = timm.create_model("resnet10t", num_classes=4).cuda()
mixing = Mixup(mixup_alpha=0.4, num_classes=4)
pictures, kinds = torch.rand(4, 3, 32, 32, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")
pictures, mixed = mixing(pictures, kinds)
loss = SoftTargetCrossEntropy()(model(pictures), mixed)
""",
        "pictures, mixed = mixing(pictures, kinds)",
        "kinds[3] = 4 is outside dimension 1 (size 4)",
        "one past the last (0 … 3)",
    ),
    Mistake(
        "trl_preferences",
        "a padding token was added, the embedding was not resized",
        _TUNED
        + """
said = Dataset.from_dict({"text": ["v1 v2 v3 v4", "v5"]})
trainer = SFTTrainer(model, SFTConfig("tuned", max_length=8, **quiet), processing_class=tokenizer, train_dataset=said)
trainer.train()
""",
        "trainer.train()",
        "= 13, but model.model.embed_tokens (nn.Embedding) has 13 rows",
        "it is a padding id, and the table of 13 rows has no row for it",
    ),
    Mistake(
        "trl_preferences",
        "a new token in the preferences",
        _TUNED
        + """
tokenizer.add_tokens(["better"])
liked = Dataset.from_dict({"prompt": ["v1 v2"], "chosen": ["v3 better"], "rejected": ["v4 v5"]})
trainer = DPOTrainer(model, LlamaForCausalLM(model.config), DPOConfig("preferred", **quiet), processing_class=tokenizer, train_dataset=liked)
trainer.train()
""",
        "trainer.train()",
        "= 14, but model.model.embed_tokens (nn.Embedding) has 13 rows",
        "resize_token_embeddings",
    ),
    Mistake(
        "vit_trainer",
        "an unlabelled picture, -1, in a Trainer",
        """
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification
import torch
model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3))
rows = [{"pixel_values": torch.rand(3, 16, 16), "labels": -1 if at == 5 else at % 3} for at in range(8)]
options = TrainingArguments("out", max_steps=2, per_device_train_batch_size=8, report_to=[], disable_tqdm=True, save_strategy="no")
trainer = Trainer(model, options, train_dataset=rows)
trainer.train()
""",
        "trainer.train()",
        "= -1 is outside the 3 classes",
        "use ignore_index=-1",
    ),
    Mistake(
        "whisper",
        "a token beyond the vocabulary",
        _WHISPER
        + """
labels = torch.tensor([[1, 40, 5, 2], [1, 6, 2, -100]], device="cuda")
loss = model(input_features=sound, labels=labels).loss
""",
        "loss = model(input_features=sound, labels=labels).loss",
        "indices[0, 2] = 40, but model.model.decoder.embed_tokens (nn.Embedding) has 40 rows",
        "resize_token_embeddings",
        'labels = torch.tensor([[1, 40, 5, 2], [1, 6, 2, -100]], device="cuda") ◂ 40 is made here',
    ),
    Mistake(
        "whisper",
        "a transcript longer than the decoder's positions",
        _WHISPER
        + """
prompt = torch.randint(3, 40, (2, 13), device="cuda")
out = model(input_features=sound, decoder_input_ids=prompt)
""",
        "out = model(input_features=sound, decoder_input_ids=prompt)",
        "index[0, 12] = 12 is outside dimension 0 (size 12) of model.model.decoder.embed_positions.weight",
        "max_length=12 in the tokenizer",
    ),
    Mistake(
        "yolo",
        "boxes of a class that the head does not have",
        """
import torch
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import IterableSimpleNamespace, DEFAULT_CFG
model = DetectionModel("yolov8n.yaml", nc=2, verbose=False).cuda()
model.args = DEFAULT_CFG
batch = {"img": torch.rand(1, 3, 64, 64, device="cuda"), "cls": torch.tensor([[0.0], [2.0]], device="cuda"), "bboxes": torch.tensor([[0.4, 0.4, 0.3, 0.3], [0.6, 0.6, 0.5, 0.4]], device="cuda"), "batch_idx": torch.zeros(2, device="cuda")}
loss, parts = model(batch)
""",
        "loss, parts = model(batch)",
        "= 2 is outside dimension 2 (size 2)",
        "one past the last (0 … 1)",
    ),
    Mistake(
        "yolo",
        "a box of a picture that the batch does not have",
        """
import torch
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils import DEFAULT_CFG
model = DetectionModel("yolov8n.yaml", nc=2, verbose=False).cuda()
model.args = DEFAULT_CFG
batch = {"img": torch.rand(1, 3, 64, 64, device="cuda"), "cls": torch.tensor([[0.0], [1.0]], device="cuda"), "bboxes": torch.tensor([[0.4, 0.4, 0.3, 0.3], [0.6, 0.6, 0.5, 0.4]], device="cuda"), "batch_idx": torch.tensor([0.0, 1.0], device="cuda")}
loss, parts = model(batch)
""",
        "loss, parts = model(batch)",
        "index[1] = 2 is outside dimension 0 (size 2)",
        "one past the last (0 … 1)",
    ),
    Mistake(
        "yolo",
        "a class more in the pictures than in the head",
        """
import torch
from ultralytics.nn.tasks import ClassificationModel
from ultralytics.utils import DEFAULT_CFG
model = ClassificationModel("yolov8n-cls.yaml", nc=2, verbose=False).cuda()
model.args = DEFAULT_CFG
batch = {"img": torch.rand(3, 3, 32, 32, device="cuda"), "cls": torch.tensor([0, 2, 1], device="cuda")}
loss, parts = model(batch)
""",
        "loss, parts = model(batch)",
        'batch["cls"][1] = 2 is outside the 2 classes',
        "they need 3 outputs, there are 2",
    ),
)
