"""Fixes for dtypes, devices and kinds of arguments that torch refused on the host."""

from __future__ import annotations

import difflib
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._fixes import called, renamed, rewritten
from cudalens.diagnosis.hints._roles import in_library
from cudalens.diagnosis.host_errors import cast, verdict_of

_DTYPES = (
    "layer_dtype",
    "product_dtypes",
    "scalar_type",
    "argument_scalar_type",
    "index_dtype",
    "gather_index_dtype",
    "written_dtype",
    "unsupported_dtype",
    "mask_or_index_dtype",
    "target_probabilities",
    "loss_target_dtype",
    "gradient_of_integers",
)
_DEVICES = ("two_devices", "layer_dtype", "index_device", "mask_device", "rnn_device")


@rule(priority=30)
def cast_needed(evidence: Evidence) -> Hint | None:
    """One tensor has to be cast to the dtype that the call takes."""
    found = verdict_of(evidence, *_DTYPES)
    if found is None or not found.values.get("want") or found.argument is None:
        return None
    want = found.values["want"]
    fact = evidence.tensor(found.argument)
    if want == found.values.get("have"):
        return None
    subject = (fact.expression if fact else None) or found.argument
    twins = [item for item in evidence.tensors if fact and item.expression == fact.expression]
    return Hint(
        text=f"{subject} is {found.values.get('have') or 'of another dtype'}: cast it to {want}",
        # The same expression for two arguments: only one of the places is meant.
        fix=rewritten(evidence, fact, _cast_to(evidence, fact, want)) if len(twins) == 1 else None,
    )


def _cast_to(evidence: Evidence, fact: TensorFact | None, want: str) -> str:
    """Write the cast, or leave the user's own cast out where the tensor before it was right."""
    text = fact.expression if fact and fact.expression else ""
    before = re.sub(r"\.(?:float|double|half|bfloat16|int|long|bool)\(\)$", "", text)
    if before != text and any(
        item.expression == before and item.dtype == want for item in evidence.tensors
    ):
        return before
    return "{x}" + cast(want)


@rule(priority=30)
def move_tensor(evidence: Evidence) -> Hint | None:
    """One tensor was left on another device than the rest."""
    found = verdict_of(evidence, *_DEVICES)
    if found is None or "devices" not in found.values or found.values.get("is_model"):
        return None
    here, there = found.values["devices"]
    fact = evidence.tensor(found.argument or "")
    if item := found.values.get("item"):
        fact = TensorFact(argument=found.argument, expression=item)
    if fact is None or not fact.expression:
        return None
    other = found.values.get("other")
    # Only a name is read a second time: a call, such as the model's, would run again.
    target = f"{other}.device" if other and "(" not in other else f'"{there}"'
    moved = f"{{x}}.to({target})"
    if fact.expression and fact.expression.endswith(".cpu()"):
        moved = fact.expression.removesuffix(".cpu()")
    return Hint(
        text=f"{fact.expression} is still on {here}: move it to {there}",
        fix=rewritten(evidence, fact, moved),
    )


@rule(priority=30)
def left_behind(evidence: Evidence) -> Hint | None:
    """A model was given one tensor on the CPU, and met a part of it further in."""
    found = verdict_of(evidence, *_DEVICES)
    if found is None or "cpu" not in found.values.get("devices", ()) or found.values.get("item"):
        return None
    inner = evidence.tensor(found.argument or "")
    if inner is None or inner.expression or inner.device != "cpu":
        return None
    line = [item for item in evidence.tensors if item.argument is None and item.shape]
    left = [item for item in line if item.device == "cpu"]
    there = {item.device for item in line} - {"cpu"}
    if len(left) != 1 or len(there) != 1:
        return None
    device = there.pop()
    return Hint(
        text=f"of what this line passes, {left[0].expression} alone is on cpu: move it to {device}",
        fix=rewritten(evidence, left[0], f'{{x}}.to("{device}")'),
    )


@rule(priority=30)
def move_model(evidence: Evidence) -> Hint | None:
    """The model was left on another device than its input."""
    found = verdict_of(evidence, *_DEVICES, "parallel_device")
    if found is None or not found.values.get("is_model"):
        return None
    here, there = found.values["devices"]
    there = there if here == "cpu" else here
    model = called(evidence)
    return Hint(
        text=f"the parameters are not on {there}: move the model",
        fix=f'{model}.to("{there}")' if model else None,
    )


@rule(priority=30)
def copy_to_host(evidence: Evidence) -> Hint | None:
    """NumPy reads host memory without a graph."""
    found = verdict_of(evidence, "numpy_of_cuda", "numpy_of_gradient")
    if found is None:
        return None
    way = ".detach()" if found.values["requires_grad"] else ""
    way += ".cpu()" if found.family == "numpy_of_cuda" else ""
    fix = rewritten(evidence, evidence.tensor("self"), "{x}" + way)
    if fix is None and found.values["receiver"]:
        fix = renamed(evidence, "numpy", f"{way[1:]}.numpy")
    return Hint(text=f"{way[1:]} gives NumPy what it can read", fix=fix)


@rule(priority=30)
def lengths_on_host(evidence: Evidence) -> Hint | None:
    """The lengths of packed sequences have to be on the CPU."""
    found = verdict_of(evidence, "packed_lengths")
    if found is None or found.values["device"] == "cpu":
        return None
    fact = TensorFact(argument="lengths", expression=found.values["expression"])
    return Hint(
        text="only the lengths go to the host; the sequences stay where they are",
        fix=rewritten(evidence, fact, "{x}.cpu()"),
    )


@rule(priority=30)
def generator_of_device(evidence: Evidence) -> Hint | None:
    """A generator has to be made for the device that it fills."""
    found = verdict_of(evidence, "generator_device")
    if found is None:
        return None
    want = found.values["want"]
    return Hint(
        text=f"the generator has to be one of {want}", fix=f'torch.Generator(device="{want}")'
    )


@rule(priority=30)
def pin_on_host(evidence: Evidence) -> Hint | None:
    """A loader with pin_memory wants samples on the CPU."""
    found = verdict_of(evidence, "pinned_cuda")
    if found is None or not found.values["in_loader"]:
        return None
    return Hint(
        text="the dataset returns tensors on the GPU: return CPU tensors, or do not pin them",
        fix="DataLoader(..., pin_memory=False)",
    )


@rule(priority=30)
def array_to_tensor(evidence: Evidence) -> Hint | None:
    """A NumPy array or a list was passed in place of a tensor."""
    found = verdict_of(evidence, "argument_type", "array_in_library")
    if found is None or found.values["want"] not in ("Tensor", "Tensor or Number"):
        return None
    got, name = found.values["got"], found.values["expression"]
    if got not in ("numpy.ndarray", "list"):
        return None
    array = got == "numpy.ndarray"
    fix = f"torch.{'from_numpy' if array else 'tensor'}({name})" if name else None
    weights = [item for item in evidence.tensors if item.argument == "weight"]
    if fix and array and "float64" in found.values["type"]:
        fix += ".float()"
    if fix and weights and weights[0].device != "cpu":
        fix += f'.to("{weights[0].device}")'
    return Hint(text=f"make a tensor of the {'array' if array else 'list'}", fix=fix)


@rule(priority=30)
def misspelt_argument(evidence: Evidence) -> Hint | None:
    """An unknown argument is spelt almost like one that the model has."""
    found = verdict_of(evidence, "unknown_argument")
    if found is None:
        return None
    near = difflib.get_close_matches(found.values["name"], found.values["known"], n=1, cutoff=0.75)
    if not near:
        return None
    name, call = found.values["name"], evidence.call_text or ""
    spelt = re.compile(rf"\b{re.escape(name)}(?=\s*=[^=])")
    fix = spelt.sub(near[0], call) if len(spelt.findall(call)) == 1 else None
    return Hint(text=f"there is an argument {near[0]}", fix=fix)


@rule(priority=30)
def pad_samples(evidence: Evidence) -> Hint | None:
    """Sequences of different lengths are padded where the batch is made."""
    found = verdict_of(evidence, "unequal_samples")
    if found is None or not found.values["in_loader"]:
        return None
    one, other = found.values["shapes"]
    if len(one) != len(other) or not one or one[1:] != other[1:]:
        return None
    return Hint(
        text=f"the samples are sequences of {one[0]} and {other[0]} steps: pad them in a "
        "collate_fn",
        fix="torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)",
    )


@rule(priority=30)
def pad_tokens(evidence: Evidence) -> Hint | None:
    """A tokenizer pads and truncates when it is asked to."""
    if verdict_of(evidence, "unequal_tokens") is None:
        return None
    return Hint(
        text="let the tokenizer make the rows equal",
        fix="tokenizer(texts, padding=True, truncation=True)",
    )


@rule(priority=30)
def reshape_for_view(evidence: Evidence) -> Hint | None:
    """``reshape`` copies where ``view`` cannot."""
    if verdict_of(evidence, "view_stride") is None:
        return None
    if in_library(evidence, "transformers"):
        viewed = evidence.tensor("self")
        return Hint(
            text="the model views it: give it a copy that lies in order",
            fix=rewritten(evidence, viewed, "{x}.contiguous()"),
        )
    return Hint(
        text="reshape does the same and copies when it has to",
        fix=renamed(evidence, "view", "reshape"),
    )


@rule(priority=30)
def truth_of_all(evidence: Evidence) -> Hint | None:
    """A condition over several elements has to say whether one or all must hold."""
    if verdict_of(evidence, "ambiguous_truth") is None:
        return None
    return Hint(text="say whether one element or all of them must hold: .any() or .all()")


@rule(priority=30)
def wrapped_checkpoint(evidence: Evidence) -> Hint | None:
    """A checkpoint of a DataParallel model carries a prefix."""
    found = verdict_of(evidence, "state_dict_keys")
    message = evidence.error.message if evidence.error else ""
    if found is None or "module." not in message:
        return None
    return Hint(
        text="one side has the prefix module. of a DataParallel model",
        fix='{key.removeprefix("module."): value for key, value in state_dict.items()}',
    )
