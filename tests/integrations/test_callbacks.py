"""The callbacks of training frameworks, with tiny models on the rehearsal device."""

from __future__ import annotations

import gc
import json
import subprocess
from pathlib import Path

import pytest
import torch

from cudalens import DeviceIndexError
from cudalens.guards.process import PROCESS
from cudalens.integrations.training import TrainingCheck
from tests.processes import python

START = """
import torch
import cudalens
from cudalens.guards.process import PROCESS
cudalens.simulate.start(announce=False)
BAD = {bad}
"""
TRANSFORMERS = """
import transformers as tr
from cudalens.integrations.transformers import CudaCheckCallback

config = tr.BertConfig(
    vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=16, num_labels=3,
)
model = tr.BertForSequenceClassification(config)
rows = [{"input_ids": [3] * 4, "labels": 1}] * 4 + [{"input_ids": [3] * 4, "labels": BAD}] * 4
arguments = tr.TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=2, report_to=[], save_steps=1,
    disable_tqdm=True, logging_strategy="no", train_sampling_strategy="sequential",
)
callback = CudaCheckCallback(deferred=DEFERRED)
trainer = tr.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
run = trainer.train
"""
LIGHTNING = """
import lightning.pytorch as pl
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from cudalens.integrations.lightning import CudaCheckCallback

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, index):
        x, y = batch
        scores = self.layer(x)
        return F.cross_entropy(scores.cuda(), y.cuda()).cpu()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

labels = torch.tensor([1] * 4 + [BAD] * 4)
loader = DataLoader(TensorDataset(torch.randn(8, 4), labels), batch_size=2)
callback = CudaCheckCallback(deferred=DEFERRED)
saving = pl.callbacks.ModelCheckpoint(dirpath="out", every_n_train_steps=1)
trainer = pl.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[callback, saving],
)
run = lambda: trainer.fit(Model(), loader)
"""
END = """
try:
    run()
except Exception as error:
    print("RAISED", type(error).__name__, error.args[0].split("\\n")[0])
callback._check.close()
print("LEFT", PROCESS.is_installed, len(PROCESS.listeners))
"""
HOSTS = {"transformers": TRANSFORMERS, "lightning": LIGHTNING}


def train_on_cuda(
    folder: Path, host: str, *, bad: int, end: str = ""
) -> subprocess.CompletedProcess[str]:
    """Train on CUDA itself, in a fresh process, with labels of which the last four are ``bad``."""
    start = START.replace("cudalens.simulate.start(announce=False)\n", "").format(bad=bad)
    program = HOSTS[host].replace("DEFERRED", "False")
    program = program.replace('accelerator="cpu"', 'accelerator="gpu", devices=1')
    text = start + program + END + end
    return python("-c", text, cwd=folder, fresh=True, TOKENIZERS_PARALLELISM="false")


def train(
    folder: Path, host: str, *, bad: int, deferred: bool = False, end: str = END
) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own with labels of which the last four are ``bad``."""
    pytest.importorskip(host)
    text = START.format(bad=bad) + HOSTS[host].replace("DEFERRED", str(deferred)) + end
    return python("-c", text, cwd=folder, CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")


@pytest.mark.thorough
@pytest.mark.parametrize("host", HOSTS)
def test_the_report_lies_beside_the_checkpoints(tmp_path: Path, host: str) -> None:
    """The third step has the first bad label; the guards are off again behind it."""
    done = train(tmp_path, host, bad=7)
    assert "RAISED DeviceIndexError" in done.stdout, done.stdout + done.stderr
    assert "= 7 is outside the 3 classes" in done.stdout
    assert "LEFT False 0" in done.stdout
    said = done.stderr.replace(f"{tmp_path}/", "")
    assert "cudalens: the report is in out/cudalens-step2.html\n" in said
    found = json.loads((tmp_path / "out" / "cudalens-step2.json").read_text("utf-8"))
    assert found["kind"] == "device_assert"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"cudalens-step2.html", "cudalens-step2.json"} < names


@pytest.mark.all
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("deferred", [False, True])
def test_a_good_training_runs_to_its_end(tmp_path: Path, host: str, deferred: bool) -> None:
    done = train(tmp_path, host, bad=2, deferred=deferred)
    assert done.stdout.endswith("LEFT False 0\n"), done.stdout + done.stderr
    assert not list(tmp_path.rglob("cudalens-*"))


@pytest.mark.all
@pytest.mark.parametrize("host", HOSTS)
def test_deferred_guards_find_it_too(tmp_path: Path, host: str) -> None:
    """Later, or at the end of training; the report is written all the same."""
    end = END.replace("    run()\n", "    run()\n    callback._check.close()\n")
    done = train(tmp_path, host, bad=7, deferred=True, end=end)
    assert "= 7 is outside the 3 classes" in done.stdout, done.stdout + done.stderr
    assert len(list((tmp_path / "out").glob("cudalens-step*.json"))) == 1


@pytest.mark.thorough
def test_the_next_training_takes_out_what_an_exception_left(tmp_path: Path) -> None:
    """A Trainer tells no callback of an exception."""
    end = """
try:
    run()
except IndexError:
    print("LEFT", len(PROCESS.listeners))
print("AGAIN", type(callback)())
callback.on_train_begin(arguments, trainer.state, trainer.control)
print("OPEN", len(PROCESS.listeners))
other = CudaCheckCallback()
other.on_train_begin(arguments, trainer.state, trainer.control)
print("OPEN", len(PROCESS.listeners))
other.close()
print("OPEN", len(PROCESS.listeners))
"""
    done = train(tmp_path, "transformers", bad=7, end=end)
    assert done.stdout.count("OPEN 1\n") == 2, done.stdout + done.stderr
    assert done.stdout.endswith("OPEN 0\n")


def test_the_guards_go_with_the_callback() -> None:
    check = TrainingCheck(deferred=False)
    check.open("out", lambda: (2, 0, 1))
    assert PROCESS.is_installed
    del check
    gc.collect()
    assert not PROCESS.is_installed


@pytest.mark.usefixtures("sim")
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    check = TrainingCheck(deferred=False)
    check.open(tmp_path / "out", lambda: (2, 1, 4))
    with pytest.raises(DeviceIndexError) as caught:
        torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")]
    check.close(caught.value)
    said = f"cudalens: the report was not written to {tmp_path}/out/cudalens-step2-rank1.html: "
    assert capsys.readouterr().err.count(said) == 1
