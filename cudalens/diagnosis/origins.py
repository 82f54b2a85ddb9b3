"""Put a fix where the values were made, and say how they came to be of the wrong kind.

Inside one call a fix leaves every other use of the tensor as it was.  Not here: how a binding is
proven (``source/bindings.py``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import replace

from cudalens.core.evidence_types import Binding
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, SourceSpan
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.user_code import Change, Fix, last_name, parsed

_AT_ORIGIN = frozenset(
    {"cast_needed", "image_not_divided", "labels_as_binary_target", "mask_of_0_and_255"}
    | {"move_tensor", "one_based_ids", "one_based_labels", "one_hot_target", "relabel"}
    | {"sign_coded_labels", "edges_with_original_ids", "segment_ids"}
)
"""Rules whose fix is of the values themselves, and not of this call's layout."""
_FACTORIES = frozenset(
    {"arange", "empty", "eye", "from_numpy", "full", "linspace", "ones", "rand", "randint"}
    | {"randn", "randperm", "tensor", "zeros"}
)
_OF_HEAD = frozenset({"too_few_places", "binary_labels_one_output"})
_OF_TABLE = frozenset({"too_few_places", "added_tokens", "padding_beyond_table"})
_OF_TABLE |= {"positions_beyond_table"}
_OF_SIZE = frozenset({"in_features", "size_of_layer"})
_LONGEST = 60


def at_origin(hints: Iterable[Hint], evidence: Evidence, trial: Trial) -> tuple[Hint, ...]:
    """Return the hints, those whose tensor is used again with a fix at the line that made it."""
    return tuple(
        _with_layer(_placed(item, evidence, trial) if item.fix else item, evidence, trial)
        for item in hints
    )


def _placed(hint: Hint, evidence: Evidence, trial: Trial) -> Hint:
    changed = hint.fix.of_name() if isinstance(hint.fix, Fix) else None
    name, value = changed or ("", "")
    found = trial.binding(name) if name and hint.rule in _AT_ORIGIN else None
    is_sorted = hint.rule == "relabel" and "torch.unique(" in value
    if is_sorted and (found is None or found.is_in_loop):
        # Another batch may hold fewer labels, and would be numbered otherwise.
        text = f"{hint.text}, once for the whole dataset: torch.unique(…, return_inverse=True)"
        return replace(hint, text=text, fix=None, tried=None)
    if hint.rule == "missing_dimension":
        return replace(hint, text=hint.text + _where_dropped(hint, trial))
    if found is None:
        return hint
    if found.dropped is not None and hint.rule in ("cast_needed", "move_tensor"):
        return _kept(hint, name, value, found.dropped, trial)
    hint = replace(hint, text=hint.text + _how_made(hint, name, found))
    assert isinstance(hint.fix, Fix)
    fix = Fix(f"{name} = {value}", [item._replace(span=None) for item in hint.fix.changes])
    if not found.is_read_again or not trial(fix).succeeds:
        return hint
    text = f"{hint.text}; {name} is used more than once: change it behind line {found.at.line}"
    return replace(hint, text=text, fix=fix, at=found.at)


def _kept(hint: Hint, name: str, value: str, dropped: tuple[str, SourceSpan], trial: Trial) -> Hint:
    """Advise to keep what a line computed and threw away, where that is what is missing."""
    text, at = dropped
    for written in (text, value):
        template = re.sub(rf"\b{re.escape(name)}\b(?!\s*=)", "{x}", written)
        fix = Fix(f"{name} = {written}", [Change(name, template)])
        if trial(fix).succeeds:
            said = f"{hint.text}; line {at.line}: {text} gives a new tensor, its result is not kept"
            return replace(hint, text=said, fix=fix, at=at)
    return hint


def _how_made(hint: Hint, name: str, found: Binding) -> str:
    """Say how a tensor came to its device or dtype."""
    if found.value is None or hint.rule not in ("cast_needed", "move_tensor"):
        return ""
    made = f"; {f'it is {found.name}, ' if found.name else ''}made in line {found.at.line}: "
    made += _short(found)
    module, _, function = (found.called or "").rpartition(".")
    is_factory = f"{module}.".startswith("torch.") and function in _FACTORIES
    if hint.rule == "move_tensor" and is_factory and not {"device", "**"} & {*found.keywords}:
        made = made.replace("made", "made on the CPU") + " without device="
        if "." in name:
            attribute = name.rpartition(".")[2]
            made += (
                f"; moving the module moves what is registered: register_buffer({attribute!r}, …)"
            )
    return made


def _where_dropped(hint: Hint, trial: Trial) -> str:
    """Name the line that took a dimension away: an index, or squeeze without a number."""
    tree = parsed(hint.fix or "")
    names = {item.id for item in ast.walk(tree) if isinstance(item, ast.Name)} if tree else set()
    for name in sorted(names):
        found = trial.binding(name)
        made = parsed(found.value or "") if found is not None else None
        is_row = isinstance(made, ast.Subscript) and isinstance(made.slice, ast.Constant | ast.Name)
        is_squeezed = isinstance(made, ast.Call) and last_name(made.func) == "squeeze"
        if found is not None and (is_row or is_squeezed):
            return f"; line {found.at.line} took one away: {name} = {_short(found)}"
    return ""


def _with_layer(hint: Hint, evidence: Evidence, trial: Trial) -> Hint:
    """Name the layer that a count of outputs or rows is of, and the line that makes it."""
    is_label = evidence.violation is not None and evidence.violation.argument == "target"
    is_of_table = hint.rule in _OF_TABLE and not is_label
    path = evidence.module_path if is_of_table or hint.rule in _OF_SIZE else None
    if hint.rule in _OF_HEAD and is_label and evidence.violation is not None:
        # The nearest parameter of the graph is that of the layer that made the scores.
        near = next((item for item in evidence.graph.nodes if item.role == "parameter"), None)
        if near is not None and near.shape and near.shape[0] == evidence.violation.size:
            path = near.module_path
    layer = trial.layer(path) if path else None
    tree = parsed(evidence.call_text or "")
    if path is None and is_of_table and isinstance(tree, ast.Call):
        layer = trial.binding(ast.unparse(tree.func))
        layer = layer and replace(layer, name=ast.unparse(tree.func))
    if layer is None or (layer.value is None and is_of_table):
        return hint
    where = "" if layer.value is None else f", made in line {layer.at.line}: {_short(layer)}"
    tied = f"; its weight is that of {layer.tied} too" if layer.tied else ""
    return replace(hint, text=f"{hint.text}; the layer is {layer.name}{where}{tied}")


def _short(found: Binding) -> str:
    value = found.value or ""
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
