# ruff: noqa: E501  the cells are as users write them
"""Mistakes that users of the libraries make, modelled on what they report, and what is said."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A cell that fails, and what its report has to say."""

    program: str
    """The program of the lane whose libraries it uses."""
    title: str
    cell: str
    line: str
    """The user's line that the report names."""
    headline: str
    """What the sentence with the value holds."""
    says: str = ""
    """What else stands in the report."""
    marks: str = ""
    """And this, beside a line of the cell."""


MISTAKES = (
    Mistake(
        "bert_trainer",
        "labels from 1 in a Trainer",
        """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import torch
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
rows = [{"input_ids": torch.arange(5, 11), "labels": 1 + at % 3} for at in range(12)]
options = TrainingArguments("out", max_steps=2, per_device_train_batch_size=6, report_to=[], disable_tqdm=True, save_strategy="no")
trainer = Trainer(BertForSequenceClassification(config), options, train_dataset=rows)
trainer.train()
""",
        "trainer.train()",
        "= 3 is outside the 3 classes",
        "the model has num_labels=3",
    ),
    Mistake(
        "bert_trainer",
        "RoBERTa's positions begin at 2",
        """
import torch
from transformers import RobertaConfig, RobertaModel
config = RobertaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)
model = RobertaModel(config).to("cuda")
tokens = torch.randint(3, 50, (2, 16), device="cuda")
hidden = model(tokens)
""",
        "hidden = model(tokens)",
        "index[0, 14] = 16 is outside dimension 1 (size 16)",
        "Positions start at 2 here, so 16 rows are enough for 14 tokens",
    ),
    Mistake(
        "gpt2_generate",
        "a token was added, the embedding was not resized",
        """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).cuda()
tokens = torch.tensor([[3, 8, 40, 5]], device="cuda")
loss = model(input_ids=tokens, labels=tokens).loss
""",
        "loss = model(input_ids=tokens, labels=tokens).loss",
        "tokens[0, 2] = 40",
        "resize_token_embeddings",
    ),
    Mistake(
        "gpt2_generate",
        "a prompt longer than the positions",
        """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2)).cuda()
tokens = torch.randint(0, 40, (1, 7), device="cuda")
made = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
""",
        "made = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)",
        "indices[0, 0] = 8, but model.transformer.wpe (nn.Embedding) has 8 rows",
        "prompt and new tokens together may have at most 8",
    ),
    Mistake(
        "t5_bart",
        "-100 is given as decoder ids",
        """
import torch
from transformers import BartConfig, BartForConditionalGeneration
model = BartForConditionalGeneration(BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)).cuda()
tokens = torch.randint(4, 50, (2, 6), device="cuda")
labels = torch.tensor([[5, 6, 7], [8, -100, -100]], device="cuda")
out = model(input_ids=tokens, decoder_input_ids=labels)
""",
        "out = model(input_ids=tokens, decoder_input_ids=labels)",
        "labels[1, 1] = -100",
    ),
    Mistake(
        "t5_bart",
        "labels beyond the vocabulary",
        """
import torch
from transformers import T5Config, T5ForConditionalGeneration
model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)).cuda()
tokens, labels = torch.randint(2, 40, (2, 5), device="cuda"), torch.tensor([[3, 40, 1], [4, 5, 1]], device="cuda")
loss = model(input_ids=tokens, labels=labels).loss
""",
        "loss = model(input_ids=tokens, labels=labels).loss",
        "indices[0, 2] = 40, but model.decoder.embed_tokens (nn.Embedding) has 40 rows",
        "40",
    ),
    Mistake(
        "vit_trainer",
        "one class too few in the head",
        """
import torch
from transformers import ViTConfig, ViTForImageClassification
model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=9)).cuda()
digits = torch.tensor([0, 4, 9], device="cuda")
loss = model(pixel_values=torch.rand(3, 3, 16, 16, device="cuda"), labels=digits).loss
""",
        'loss = model(pixel_values=torch.rand(3, 3, 16, 16, device="cuda"), labels=digits).loss',
        "digits[2] = 9 is outside the 9 classes",
    ),
    Mistake(
        "layoutlm",
        "boxes in pixels",
        """
import torch
from transformers import LayoutLMv3Config, LayoutLMv3Model
model = LayoutLMv3Model(LayoutLMv3Config(vocab_size=80, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, coordinate_size=8, shape_size=8, input_size=24, patch_size=8)).cuda()
words = torch.randint(3, 80, (1, 2), device="cuda")
boxes = torch.tensor([[[10, 10, 400, 90], [1180, 20, 1650, 80]]], device="cuda")
hidden = model(input_ids=words, bbox=boxes)
""",
        "hidden = model(input_ids=words, bbox=boxes)",
        "= 1180, but model.embeddings.x_position_embeddings (nn.Embedding) has 1024 rows",
        "these look like pixels. Scale them by the page's width and height",
    ),
    Mistake(
        "llama_cache",
        "the padding token of a tokenizer that was extended",
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)).cuda()
batch = {"input_ids": torch.tensor([[32, 32, 5, 6], [7, 8, 9, 10]], device="cuda")}
out = model(**batch)
""",
        "out = model(**batch)",
        'batch["input_ids"][0, 0] = 32',
        "resize_token_embeddings",
    ),
    Mistake(
        "peft_lora",
        "tokens of a larger tokenizer behind an adapter",
        """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
base = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])).cuda()
ids = torch.tensor([[4, 33, 6]], device="cuda")
loss = model(input_ids=ids, labels=ids).loss
""",
        "loss = model(input_ids=ids, labels=ids).loss",
        "ids[0, 1] = 33",
        "resize_token_embeddings",
    ),
    Mistake(
        "accelerate_loop",
        "a bad item behind the loader that prefetches",
        """
import torch
from accelerate import Accelerator
from torch import nn
helper = Accelerator()
model, rows = nn.Linear(4, 3), [(torch.randn(4), at % 3) for at in range(16)]
rows[9] = rows[9][0], 3
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, loader = helper.prepare(model, loader)
for features, kind in loader:
    loss = nn.functional.cross_entropy(model(features), kind)
    helper.backward(loss)
""",
        "loss = nn.functional.cross_entropy(model(features), kind)",
        "kind[1] = 3 is outside the 3 classes",
        "rows[9]",
    ),
    Mistake(
        "lightning_fit",
        "labels from 1 in a training step",
        """
import lightning, logging, torch
from torch import nn
from torch.nn import functional as F
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
    def training_step(self, batch, number):
        features, kind = batch
        return F.cross_entropy(self.net(features), kind)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
rows = torch.utils.data.TensorDataset(torch.randn(6, 4), torch.tensor([1, 2, 3, 1, 2, 3]))
trainer = lightning.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=6))
""",
        "return F.cross_entropy(self.net(features), kind)",
        "kind[2] = 3 is outside the 3 classes",
        "phase forward",
    ),
    Mistake(
        "lightning_fit",
        "a tensor without device in a training step",
        """
import lightning, logging, torch
from torch import nn
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, number):
        noise = torch.randn(6, 4)
        return (self.net(batch[0]) + (batch[0] + noise).sum()).mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
rows = torch.utils.data.TensorDataset(torch.randn(6, 4))
trainer = lightning.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=6))
""",
        "return (self.net(batch[0]) + (batch[0] + noise).sum()).mean()",
        "noise",
        "phase forward",
    ),
    Mistake(
        "timm_train",
        "labels of 1000 classes, a head of 10",
        """
import timm, torch
model = timm.create_model("resnet10t", num_classes=10).cuda()
kinds = torch.tensor([3, 281], device="cuda")
loss = timm.loss.LabelSmoothingCrossEntropy()(model(torch.rand(2, 3, 32, 32, device="cuda")), kinds)
""",
        'loss = timm.loss.LabelSmoothingCrossEntropy()(model(torch.rand(2, 3, 32, 32, device="cuda")), kinds)',
        "kinds[1] = 281 is outside dimension 1 (size 10)",
        "281",
    ),
    Mistake(
        "torchvision_models",
        "a detection head without the background",
        """
import torch
from tests.libraries.programs.torchvision_models import body
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign
model = FasterRCNN(body(), num_classes=3, rpn_anchor_generator=AnchorGenerator(((16, 32),), ((1.0,),)), box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2), min_size=48, max_size=64).cuda()
targets = [{"boxes": torch.tensor([[4.0, 4, 30, 30]], device="cuda"), "labels": torch.tensor([3], device="cuda")}]
losses = model([torch.rand(3, 48, 48, device="cuda")], targets)
""",
        'losses = model([torch.rand(3, 48, 48, device="cuda")], targets)',
        " = 3 is outside the 3 classes",
        "= 3",
    ),
    Mistake(
        "torchvision_models",
        "a mask with 255",
        """
import torch
from torch import nn
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
model = lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=4).cuda()
mask = torch.randint(0, 4, (2, 32, 32), device="cuda")
mask[:, 0] = 255
loss = nn.functional.cross_entropy(model(torch.rand(2, 3, 32, 32, device="cuda"))["out"], mask)
""",
        'loss = nn.functional.cross_entropy(model(torch.rand(2, 3, 32, 32, device="cuda"))["out"], mask)',
        "mask[0, 0, 0] = 255 is outside the 4 classes",
        "ignore_index=255",
    ),
    Mistake(
        "graph_networks",
        "an edge to a node that is not there",
        """
import torch
from torch_geometric.nn import GraphConv
layer = GraphConv(6, 3).to("cuda")
x = torch.randn(4, 6, device="cuda")
pairs = torch.tensor([[1, 2, 4, 3], [3, 1, 2, 1]], device="cuda")
h = layer(x, pairs)
""",
        "h = layer(x, pairs)",
        "pairs[0][2] = 4",
        "one past the last (0 … 3)",
    ),
    Mistake(
        "graph_networks",
        "a batch of graphs for too few groups, in a layer of one's own",
        """
import torch
from torch_geometric.nn import MessagePassing
class Mean(MessagePassing):
    def forward(self, x, edges):
        return self.propagate(edges, x=x)
    def message(self, x_j):
        return x_j
layer, x = Mean(), torch.randn(3, 2, device="cuda")
edges = torch.tensor([[0, 1, 2], [1, 2, 3]], device="cuda")
h = layer(x, edges)
""",
        "return self.propagate(edges, x=x)",
        "index[2, 0] = 3 is outside dimension 0 (size 3)",
        "= 3",
    ),
    Mistake(
        "diffusion",
        "a time step beyond the schedule",
        """
import torch
from diffusers import DDPMScheduler
noising = DDPMScheduler(num_train_timesteps=50)
clean = torch.rand(2, 3, 8, 8, device="cuda")
when = torch.tensor([7, 50], device="cuda")
noisy = noising.add_noise(clean, torch.randn_like(clean), when)
""",
        "noisy = noising.add_noise(clean, torch.randn_like(clean), when)",
        "when[1] = 50",
        "49",
    ),
    Mistake(
        "segmentation_models",
        "a mask with 255 in a Dice loss",
        """
import segmentation_models_pytorch as smp
import torch
scores = torch.randn(1, 3, 8, 8, device="cuda")
mask = torch.randint(0, 3, (1, 8, 8), device="cuda")
mask[0, 0, :4] = 255
loss = smp.losses.DiceLoss(mode="multiclass")(scores, mask)
""",
        'loss = smp.losses.DiceLoss(mode="multiclass")(scores, mask)',
        "mask[0, 0, 0] = 255 is outside num_classes = 3",
        "255",
    ),
    Mistake(
        "monai_unet",
        "a label beyond the channels of the network",
        """
import torch
from monai.losses import DiceCELoss
scores = torch.randn(1, 3, 8, 8, device="cuda")
organ = torch.randint(0, 3, (1, 1, 8, 8), device="cuda")
organ[0, 0, 2, 5] = 3
loss = DiceCELoss(to_onehot_y=True, softmax=True)(scores, organ)
""",
        "loss = DiceCELoss(to_onehot_y=True, softmax=True)(scores, organ)",
        "organ[0, 0, 2, 5] = 3 is outside dimension 1 (size 3)",
        "= 3",
    ),
    Mistake(
        "baselines",
        "an action beyond the policy's",
        """
import torch
from stable_baselines3.common.distributions import CategoricalDistribution
policy = CategoricalDistribution(3).proba_distribution(torch.randn(2, 3, device="cuda"))
actions = torch.tensor([1, 3], device="cuda")
policy.distribution._validate_args = False
chance = policy.log_prob(actions)
""",
        "chance = policy.log_prob(actions)",
        "actions[1] = 3 is outside dimension 1 (size 3)",
        "= 3",
    ),
    Mistake(
        "rl_losses",
        "an action index beyond the head",
        """
import torch
from torchrl.modules import MLP
scores = MLP(in_features=3, out_features=2, num_cells=[8], device="cuda")(torch.randn(4, 3, device="cuda"))
action = torch.tensor([[0], [1], [2], [1]], device="cuda")
chosen = scores.gather(-1, action)
""",
        "chosen = scores.gather(-1, action)",
        "action[2, 0] = 2",
        "one past the last (0 … 1)",
    ),
    Mistake(
        "gaussian_processes",
        "a task beyond num_tasks",
        """
import gpytorch, torch
kernel = gpytorch.kernels.IndexKernel(num_tasks=2).cuda()
task = torch.tensor([[0], [1], [2]], device="cuda")
covariance = kernel(task).to_dense()
""",
        "covariance = kernel(task).to_dense()",
        "index out of row bound: 2",
        "What CUDA does with it is not known here",
    ),
    Mistake(
        "forecasting",
        "a category that the embedding was not made for",
        """
import torch
from pytorch_forecasting.models.nn import MultiEmbedding
table = MultiEmbedding({"month": (12, 4)}, x_categoricals=["month"]).cuda()
month = torch.tensor([[[1], [12]]], device="cuda")
vectors = table(month)
""",
        "vectors = table(month)",
        "month[0, 1, 0] = 12, but table.embeddings.month (nn.Embedding) has 12 rows",
        "= 12",
    ),
    Mistake(
        "sentences",
        "a word beyond the encoder's table",
        """
import torch
from transformers import BertConfig, BertModel
model = BertModel(BertConfig(vocab_size=45, hidden_size=24, num_hidden_layers=1, num_attention_heads=3)).cuda()
features = {"input_ids": torch.tensor([[2, 45, 3]], device="cuda"), "attention_mask": torch.ones(1, 3, device="cuda")}
found = model(**features)
""",
        "found = model(**features)",
        'features["input_ids"][0, 1] = 45',
        "resize_token_embeddings",
    ),
)


def judged(mistake: Mistake) -> str | None:
    """Run the cell checked; return what its report says wrongly, ``None`` if nothing."""
    import cudalens
    from cudalens.source.files import CELLS

    cell = mistake.cell.strip("\n")
    CELLS.register("<a mistake>", 1, cell.splitlines())
    try:
        with cudalens.check() as session:
            exec(compile(cell, "<a mistake>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    else:
        raised = "nothing was raised"
    report = session.report
    if report is None:
        return f"no report; {raised}"
    line = report.source.text if report.source else None
    text = f"{report.to_text(width=200)}\nphase {report.phase}"
    headline = report.headline_own or report.headline
    is_right = line == mistake.line and mistake.headline in headline
    unbroken = " ".join(text.split())  # wherever the report breaks its lines
    is_right &= mistake.says in unbroken and mistake.marks in unbroken
    return None if is_right else f"line {line!r}\n{text}"
