"""What torch.cuda answers, and what copies, models, threads and tracers meet on the device."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.simulate.device import CUDA, on_cuda, same

pytestmark = pytest.mark.usefixtures("seeded")


# --- torch.cuda ----------------------------------------------------------------------------


def test_device_has_its_own_random_stream() -> None:
    """The device draws from its own stream: seeded, saved, restored and forked on its own."""
    torch.manual_seed(5)
    host_first = torch.rand(3)
    torch.manual_seed(5)
    torch.rand(100, device="cuda")
    assert torch.equal(torch.rand(3), host_first)
    torch.cuda.manual_seed(7)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed(7)
    dropped = F.dropout(torch.ones(64, device="cuda"))
    torch.cuda.manual_seed(7)
    assert torch.equal(F.dropout(torch.ones(64, device="cuda")), dropped)


def test_device_generator() -> None:
    """A device generator draws on the device; a CPU generator is refused there."""
    generator = torch.Generator(device="cuda")
    assert generator.device.type == "cuda"
    assert isinstance(generator, torch.Generator)
    generator.manual_seed(3)
    first = torch.rand(3, device="cuda", generator=generator)
    generator.manual_seed(3)
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), first)
    assert generator.initial_seed() == 3
    weights = torch.ones(4, device="cuda")
    assert torch.multinomial(weights, 2, generator=generator).is_cuda
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    assert torch.Generator().device.type == "cpu"


def test_device_queries_streams_events() -> None:
    """The torch.cuda surface answers, honestly, for one device; streams and events work."""
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert "cudalens" in torch.cuda.get_device_name()
    assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name
    major, minor = torch.cuda.get_device_capability()
    assert (major, minor) >= (7, 0)
    assert torch.cuda.is_bf16_supported() in (True, False)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    stream = torch.cuda.Stream()
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start_event.record()
        x = torch.ones(3, device="cuda") + 1
        x.record_stream(stream)
        end_event.record()
    stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    end_event.synchronize()
    assert end_event.query()
    assert start_event.elapsed_time(end_event) >= 0
    with torch.cuda.nvtx.range("marked"):
        x.add_(1)
    assert torch.cuda.is_current_stream_capturing() is False
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


def test_device_memory_is_counted() -> None:
    """memory_allocated rises with a tensor and falls when it is gone."""
    before = torch.cuda.memory_allocated()
    x = torch.empty(1024, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    view = x[:2]
    del x
    assert torch.cuda.memory_allocated() - before == 4096
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4096
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


# --- copies and files ----------------------------------------------------------------------


def test_device_deepcopy_and_pickle() -> None:
    """Deep copies and pickles stay on the device with memory of their own."""
    x = on_cuda(3)
    twin = copy.deepcopy(x)
    assert twin.is_cuda
    assert torch.equal(twin, x)
    assert twin.data_ptr() != x.data_ptr()
    model = copy.deepcopy(nn.Linear(2, 2).to(CUDA))
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_cuda
    loaded = pickle.loads(pickle.dumps({"x": x}))["x"]
    assert loaded.is_cuda
    assert torch.equal(loaded, x)


def test_device_save_and_load() -> None:
    """torch.save and torch.load keep the device, or move with map_location."""

    def through_file(thing: Any, **options: Any) -> Any:
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        return torch.load(file, **options)

    x = on_cuda(3)
    state = nn.Linear(2, 2).to(CUDA).state_dict()
    assert through_file(x).is_cuda
    assert torch.equal(through_file(x), x)
    assert through_file(x, map_location="cpu").device.type == "cpu"
    assert through_file(x.cpu(), map_location="cuda").device == CUDA
    assert through_file(x.cpu(), map_location=torch.device("cuda", 0)).is_cuda
    assert all(t.is_cuda for t in through_file(state).values())
    assert through_file(state, map_location="cpu")["weight"].device.type == "cpu"
    shared = through_file({"a": x, "b": x[:2]})
    assert shared["a"].data_ptr() == shared["b"].data_ptr()
    assert isinstance(through_file(nn.Parameter(x)), nn.Parameter)


def test_device_compile_runs_eagerly() -> None:
    """torch.compile with the eager backend, or forced eager, runs on device tensors."""

    def f(x: Tensor) -> Tensor:
        return x.sin() + x.cos()

    x = on_cuda(3)
    with torch.compiler.set_stance("force_eager"):
        assert same(torch.compile(f)(x), f(x.cpu()))
    torch._dynamo.reset()
    assert same(torch.compile(f, backend="eager", fullgraph=True)(x), f(x.cpu()))
    torch._dynamo.reset()


# --- models --------------------------------------------------------------------------------


def _config(name: str, **sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}Config")(
        vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )


def _encoder(name: str, **sizes: Any) -> Any:
    return _config(
        name,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )


def _bert() -> Any:
    import transformers

    return transformers.BertLMHeadModel(_encoder("Bert", is_decoder=True))


def _bart() -> Any:
    import transformers

    return transformers.BartForConditionalGeneration(
        _config(
            "Bart",
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=32,
            dropout=0.0,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    )


def _t5() -> Any:
    import transformers

    return transformers.T5ForConditionalGeneration(
        _config(
            "T5",
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        _config(
            "Llama",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def _gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        _config(
            "GPT2",
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _layout() -> Any:
    import transformers

    return transformers.LayoutLMv3ForTokenClassification(
        _encoder(
            "LayoutLMv3",
            max_2d_position_embeddings=64,
            coordinate_size=2,
            shape_size=4,
            input_size=16,
            patch_size=8,
            num_labels=3,
        )
    )


def _batch(name: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(3, 40, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    if name == "layoutlmv3":
        batch["bbox"] = torch.randint(0, 8, (2, 6, 1)).expand(2, 6, 4).contiguous()
        batch["pixel_values"] = torch.randn(2, 3, 16, 16)
        batch["labels"] = ids % 3
    return batch


def _two_steps(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MODELS = {
    "bert": _bert,
    "bart": _bart,
    "t5": _t5,
    "llama": _llama,
    "gpt2": _gpt2,
    "layoutlmv3": _layout,
}


@pytest.mark.parametrize("name", MODELS)
def test_device_transformer_trains_and_generates(name: str) -> None:
    """Two AdamW steps lose as on the CPU; beams agree with the CPU and sampling runs."""
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    host = MODELS[name]()
    device = copy.deepcopy(host).to("cuda")
    batch = _batch(name)
    moved = {k: v.to("cuda") for k, v in batch.items()}
    expected = _two_steps(host, batch)
    assert _two_steps(device, moved) == pytest.approx(expected, abs=1e-3)
    if name == "layoutlmv3":
        return
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    host.eval()
    device.load_state_dict(host.state_dict())
    device.eval()
    prompt, moved_prompt = (
        {k: b[k] for k in ("input_ids", "attention_mask")} for b in (batch, moved)
    )
    beams = host.generate(**prompt, num_beams=2, do_sample=False, **options)
    device_beams = device.generate(**moved_prompt, num_beams=2, do_sample=False, **options)
    assert device_beams.is_cuda
    assert device_beams.tolist() == beams.tolist()
    sampled = device.generate(**moved_prompt, do_sample=True, **options)
    assert sampled.is_cuda
    assert sampled.shape == device.generate(**moved_prompt, do_sample=False, **options).shape
