"""The names that a library has for the user's tensors."""

from __future__ import annotations

import pytest
import torch

from tests.probes import Probe, named, run_cell


def test_a_library_calls_the_tensor_by_its_own_name() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    sizes |= dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 4)
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    ids, types = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    batch = transformers.BatchEncoding({"input_ids": ids, "token_type_ids": types})
    with Probe("embedding") as probe:
        run_cell("out = model(**batch)", {"model": model, "batch": batch})
    by_module = {site.module_path: site for site in probe.sites}
    site = by_module["embeddings.token_type_embeddings"]
    assert named(site) == {"indices": 'batch["token_type_ids"]'}
    assert site.library_names[0][1] == "token_type_ids"
    assert site.api == "torch.nn.functional.embedding"
    position = by_module["embeddings.position_embeddings"]
    assert named(position) == {}
    assert position.library_names[0][1] == "position_ids"
