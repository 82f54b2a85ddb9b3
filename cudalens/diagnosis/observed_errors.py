"""Observers of exceptions: arguments, shapes, writes and graphs behind an error of PyTorch's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from math import prod

from cudalens.core.evidence_types import Binding
from cudalens.core.report import Evidence
from cudalens.core.report_types import (
    LineRef,
    MarkedLine,
    Observation,
    ObservationKind,
    SourceSpan,
    TensorFact,
    format_count,
    format_shape,
    syntax,
)
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.host_errors._base import is_known_message
from cudalens.diagnosis.user_code import (
    call_node,
    code_of,
    is_failing_line,
    place,
    shortened,
    written,
)

_OF_SIZES = re.compile(
    r"\bsizes?\b|\bshapes?\b|must match|divisible|batch_size|out of bounds|\bchannels\b|length"
)
_OF_DEVICES = re.compile(r"\bdevices?\b|\bcpu\b|\bcuda(?::\d+)?\b", re.IGNORECASE)
_OF_DTYPES = re.compile(
    r"\bdtypes?\b|\btype\b|Float|Double|Half|Long|\bInt\b|not implemented for|\bbool\b"
)
_OF_WEIGHTS = re.compile(r"for all \d+ classes .* weight tensor of shape: \[(?P<given>\d+)\]")
_INVALID = re.compile(r"^shape '\[(?P<sizes>-?\d+(?:, -?\d+)*)\]' is invalid for input of size \d+")
_MAX_MISFITS = 3
_MAX_EARLIER = 2
_FEW = 20
"""How many items of a list a line shows."""


def observe_error(evidence: Evidence, trial: Trial) -> Iterator[Observation]:
    """Yield the arguments of a failing call with their lines, or autograd's writes and graphs."""
    error = evidence.error
    if error is None:
        return
    # Errors of autograd and of checkpoints have their own facts. Arguments would not explain them.
    if evidence.modified is not None:
        yield from _writes(evidence)
        return
    if evidence.freed is not None and evidence.freed.made is not None:
        yield from _graph(evidence)
        return
    if error.message.startswith("Error(s) in loading"):
        yield from _misfits(error.message)
        return
    yield from _arguments(evidence)
    message = error.message.partition("\n")[0]
    yield from _lists(evidence, trial, message)
    yield from _number(evidence)
    yield from _given_sizes(evidence, trial, message)
    if (weights := _OF_WEIGHTS.search(message)) is not None:
        yield from _class_weights(evidence, trial, int(weights["given"]))
    # The property that the message is about decides which facts about operands are listed.
    kind: ObservationKind | None = None
    # A called module's parameters are not among its operands, but count for the devices.
    devices = {item.device for item in trial.operands} | ({trial.called.device} - {None})
    if len(devices) > 1 and _OF_DEVICES.search(message):
        kind = "device"
    elif len({item.dtype for item in trial.operands}) > 1 and _OF_DTYPES.search(message):
        kind = "dtype"
    elif _OF_SIZES.search(message):
        kind = "shape"
    if (change := evidence.regrouped) is not None:
        before, after = format_shape(change.before), format_shape(change.after)
        text = f"{place(change.line, evidence)} makes {after} of {before}: {change.line.text}"
        source = marked(change.line, f"{before} becomes {after} here")
        facts = {"before": change.before, "after": change.after}
        yield Observation(kind="shape", text=text, facts=facts, sources=(source,))
    elif kind is not None:
        yield from _earlier_shapes(evidence) if kind == "shape" else ()
        yield from _operands(evidence, trial, kind, message)
    elif not is_known_message(message):
        yield from _not_numbers(evidence)


def _number(evidence: Evidence) -> Iterator[Observation]:
    """Yield the line that chose a number of the call."""
    origin = evidence.bound
    if origin is not None and origin.is_set and not is_failing_line(origin.at, evidence):
        text = f"{origin.holder} is set in {place(origin.at, evidence)}: {origin.expression}"
        source = marked(origin.at, f"{origin.holder} is set here")
        yield Observation(kind="bound", text=text, sources=(source,))


def _earlier_shapes(evidence: Evidence) -> Iterator[Observation]:
    """Yield the other shape that a tensor of the line had in earlier calls."""
    for it in evidence.earlier_shapes[:_MAX_EARLIER]:
        calls = format_count(it.calls, "earlier call")
        text = f"{it.name} is {format_shape(it.shape)}, and was {format_shape(it.earlier)} in "
        facts = {"name": it.name, "shape": it.shape, "earlier": it.earlier, "calls": it.calls}
        yield Observation(kind="earlier", text=f"{text}{calls}", facts=facts)


def _given_sizes(evidence: Evidence, trial: Trial, message: str) -> Iterator[Observation]:
    """Yield the last size that would fit, and the lines that chose the names passed as sizes.

    For ``x.view(batch, steps, width)`` if the other sizes are the first ones of ``x``.
    """
    match, call = _INVALID.match(message), call_node(evidence)
    if match is None or not isinstance(call, ast.Call) or len(trial.operands) != 1:
        return
    sizes, x = [*map(int, match["sizes"].split(", "))], trial.operands[0]
    given = _sizes_of(evidence, call, x)
    if len(given) != len(sizes) or any(isinstance(it, ast.Starred) for it in given):
        return
    first, rest = x.shape[: len(sizes) - 1], prod(x.shape[len(sizes) - 1 :])
    if 1 < len(sizes) <= len(x.shape) and first == tuple(sizes[:-1]) and sizes[-1] > 0:
        text = f"{x.expression} has {rest} elements for each of {format_shape(first)}, and "
        text += f"{ast.unparse(given[-1])} is {sizes[-1]}"
        yield Observation(kind="shape", text=text, facts={"left": rest, "given": sizes[-1]})
    lines: dict[LineRef, list[str]] = {}
    for node, size in zip(given, sizes, strict=True):
        made = trial.binding(node.id) if isinstance(node, ast.Name) else None
        is_shown = made is None or made.value == str(size) or is_failing_line(made.at, evidence)
        if made is not None and not is_shown:
            lines.setdefault(made.at.ref, []).append(f"{ast.unparse(node)} = {size}")
    for line, names in lines.items():
        text = f"{', '.join(names)}, set in {place(line, evidence)}: {line.text}"
        source = marked(line, f"{', '.join(names)} here")
        yield Observation(kind="bound", text=text, facts={"sizes": sizes}, sources=(source,))


def _sizes_of(evidence: Evidence, call: ast.Call, x: TensorFact) -> Sequence[ast.expr]:
    """Return the sizes that a call passes one by one, empty if it may pass a sequence."""
    if call.args and isinstance(call.args[-1], ast.Tuple | ast.List):
        return call.args[-1].elts
    method = call.func if isinstance(call.func, ast.Attribute) else None
    is_of_x = method is not None and written(evidence, method.value) == x.expression
    return call.args if is_of_x and len(call.args) > 1 else ()


def _class_weights(evidence: Evidence, trial: Trial, count: int) -> Iterator[Observation]:
    """Yield the labels that are as many as the class weights, and where the weights were made."""
    for fact in evidence.tensors:
        labels = fact.summary.unique
        if labels is not None and len(labels) == count and fact.expression:
            text = f"{fact.expression} has {count} different values: {', '.join(map(str, labels))}"
            yield Observation(kind="values", text=text, facts={"values": tuple(labels)})
    call = call_node(evidence)
    keywords = (it for it in ast.walk(call or ast.Pass()) if isinstance(it, ast.keyword))
    given = [it.value for it in keywords if it.arg == "weight"]
    names = {it.id for value in given for it in ast.walk(value) if isinstance(it, ast.Name)}
    for name in sorted(names):
        made = trial.binding(name)
        if made is not None and made.value and not is_failing_line(made.at, evidence):
            text = f"{name} is made in {place(made.at, evidence)}: {shortened(made.value)}"
            source = marked(made.at, f"{name} is made here")
            yield Observation(kind="argument", text=text, sources=(source,))


def _not_numbers(evidence: Evidence) -> Iterator[Observation]:
    """Yield which tensors of the line contain NaN, if the message does not mention values.

    Comparisons with NaN are false, and factorizations fail with a library's message.
    """
    for fact in evidence.tensors:
        bad, total = fact.summary.nan, prod(fact.shape)
        if fact.expression and bad:
            verb = "is" if bad == 1 else "are"
            values = "value" if total == 1 else "values"
            text = f"{bad} of {total} {values} of {fact.expression} {verb} NaN"
            facts = {"name": fact.expression, "nan": bad, "total": total}
            yield Observation(kind="values", text=text, facts=facts)


def marked(line: LineRef | SourceSpan, mark: str) -> MarkedLine:
    """Return a line with a mark such as ``10 is made here``."""
    ref = line.ref if isinstance(line, SourceSpan) else line
    return MarkedLine(line=ref.line, text=ref.text, cell=ref.cell, file=ref.file, mark=mark)


_PLAIN = frozenset({"int", "float", "bool", "tuple", "str", "module"})
"""Types that are too common to mention for a failing call."""


_REFUSED = "received an invalid combination of arguments"


def _arguments(evidence: Evidence) -> Iterator[Observation]:
    """Yield what the argument is whose type the message mentions."""
    message = evidence.error.message if evidence.error is not None else ""
    for item in evidence.refused_arguments.odd_arguments:
        is_meant = bool(re.search(rf"(?<!\w){re.escape(item.type_name)}\b", message))
        # Up to torch 2.10 the message does not show the items of a tuple of sizes.
        is_meant = is_meant or (item.type_name == "method" and _REFUSED in message)
        is_written_out = item.name.startswith(("[", "(", "{"))  # the line shows the value
        if item.type_name in _PLAIN or is_written_out:
            continue
        if is_meant and item.name not in message:
            facts = {"name": item.name, "type": item.type_name}
            yield Observation(kind="argument", text=f"{item.name} is {item.words}", facts=facts)


_SHAPE = r"(?:torch\.Size\()?[\[(]([\d, ]*)[\])]\)?"
_MISFIT = re.compile(
    rf"size mismatch for ([\w.]+): copying a param with shape {_SHAPE} from checkpoint, "
    rf"the shape in current model is {_SHAPE}"
)


def _misfits(message: str) -> Iterator[Observation]:
    """Yield all parameters of a checkpoint that do not fit; the headline has only the first."""
    found = _MISFIT.findall(message)
    if len(found) > 1:
        each = [
            f"{name} is {_shape(old)} there, {_shape(new)} here"
            for name, old, new in found[:_MAX_MISFITS]
        ]
        more = len(found) - len(each)
        text = "; ".join(each) + (f"; and {more} more" if more else "")
        facts = {"names": tuple(name for name, _, _ in found)}
        yield Observation(
            kind="argument", text=f"{len(found)} parameters do not fit: {text}", facts=facts
        )


def _shape(digits: str) -> str:
    return format_shape(map(int, re.findall(r"\d+", digits)))


def _lists(evidence: Evidence, trial: Trial, message: str) -> Iterator[Observation]:
    """Yield the list in a message, and the item of a nested list whose length differs."""
    match = re.match(r"expected sequence of length (\d+) at dim (\d+)", message)
    for name, items in trial.lists:
        if match is not None and (odd := _odd_item(items, int(match[2]), int(match[1]))):
            path, count = odd
            first = "[0]" * int(match[2])
            text = f"{name}{path} has {count} items, {name}{first} has {match[1]}"
            facts: dict[str, object] = {"name": f"{name}{path}", "count": count}
            yield Observation(kind="argument", text=text, facts=facts)
        elif name[:1] != "[" and items and len(items) <= _FEW and str(items) in message:
            root = re.match(r"[\w.]+?(?=\.\w+\(\)$|$)", name)
            made = trial.binding(root[0]) if root is not None else None
            text = f"{name} is {items}"
            sources: tuple[MarkedLine, ...] = ()
            if made is not None and made.value and not is_failing_line(made.at, evidence):
                assert root is not None
                text += f", {root[0]} is made in {place(made.at, evidence)}: {code_of(made)}"
                sources = (marked(made.at, f"{root[0]} is made here"),)
            facts = {"name": name, "values": tuple(items)}
            yield Observation(kind="argument", text=text, facts=facts, sources=sources)


def _odd_item(items: object, depth: int, length: int) -> tuple[str, int] | None:
    """Return path and length of the first list at a depth with another length."""
    if type(items) is not list:
        return None
    if depth == 0:
        return ("", len(items)) if len(items) != length else None
    found = ((at, _odd_item(it, depth - 1, length)) for at, it in enumerate(items))
    return next(((f"[{at}]{odd[0]}", odd[1]) for at, odd in found if odd is not None), None)


# --- operands -------------------------------------------------------------------------------------


def _operands(
    evidence: Evidence, trial: Trial, kind: ObservationKind, message: str
) -> Iterator[Observation]:
    """Yield what each operand is and where it was made, those in the message first."""
    facts = [item for item in trial.operands if item.expression]
    numbers = {int(number) for number in re.findall(r"\d+", message)} - {0, 1}
    # Only the operands that the message is about: with its numbers as sizes, or the odd dtype.
    if kind == "shape":
        guilty = [item for item in facts if numbers & {*item.shape}]
        facts = guilty or facts
    elif kind == "dtype":
        counts = [item.dtype for item in facts]
        rare = [item for item in facts if counts.count(item.dtype) == 1]
        facts = rare if len(rare) == 1 else facts
    # One line for each origin, even if several operands come from it.
    seen: set[str] = set()
    for fact in facts:
        for name, made in _made_of(fact, trial):
            if name in seen or not made.value or is_failing_line(made.at, evidence):
                continue
            seen.add(name)
            what = _what(fact, kind) if name == fact.expression else ""
            verb = "made" if _is_new(made, trial) else "set"
            is_what = f" is {what}," if what else " is"
            text = f"{name}{is_what} {verb} in {place(made.at, evidence)}: {code_of(made)}"
            if kind == "device" and fact.device == "cpu" and _is_without_device(made):
                text += " (without device=)"
            mark = f"{what or name} is {verb} here"
            if what and (kind == "device" or verb == "set"):
                mark = f"{name} is {verb} here, {what}"
            yield Observation(
                kind=kind,
                text=text,
                facts={
                    "name": name,
                    "shape": fact.shape,
                    "dtype": fact.dtype,
                    "device": fact.device,
                },
                sources=(marked(made.at, mark),),
            )
    # The layer that rejected its input may be the one with the wrong size.
    layer = trial.layer(evidence.module_path) if evidence.module_path else None
    if layer is None or not layer.value or layer.name in seen:
        return
    if not is_failing_line(layer.at, evidence):
        text = f"{layer.name} is made in {place(layer.at, evidence)}: {code_of(layer)}"
        source = marked(layer.at, f"{layer.name} is made here")
        layer_facts = {"name": layer.name, "code": layer.value}
        yield Observation(kind=kind, text=text, facts=layer_facts, sources=(source,))


_FACTORIES = functions(Trait.FACTORY) | {"tensor"}


def _is_without_device(made: Binding) -> bool:
    """Return whether a torch function made a tensor on the CPU because no device was passed."""
    module, _, function = (made.called or "").rpartition(".")
    is_factory = f"{module}.".startswith("torch.") and function in _FACTORIES
    return is_factory and not {"device", "**"} & {*made.keywords}


_HAND_ON = functions(Trait.VIEW) | {"as_tensor", "asarray", "from_numpy"}
_MAY_DO_NOTHING = re.compile(r"[Dd]ropout|^(?:Identity|Sequential|Flatten)$")


def _is_new(made: Binding, trial: Trial) -> bool:
    """Return whether a line makes its value, rather than passing on an existing one.

    A user's function may return a stored tensor. A dropout may return its argument.
    """
    # ``torch.zeros(2).cuda()`` moves a tensor that is made on the same line.
    first = syntax(made.value)
    while isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute):
        if not isinstance(first.func.value, ast.Call):
            break
        first = first.func.value
    start = ast.unparse(first.func) if isinstance(first, ast.Call) else ""
    if start.startswith("torch.") and start[6:] in {*_FACTORIES, "from_numpy"}:
        return True
    called, value = made.called or "", syntax(made.value)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        called = ast.unparse(value.func)
        if value.func.attr not in _HAND_ON:
            break
        value = value.func.value  # torch.zeros(3).cuda() makes a tensor
    layer = trial.binding(called) if called else None
    if called:
        called = called if layer is None else layer.called or ""
        root, name = called.partition(".")[0], called.rpartition(".")[2]
        is_library = root in ("torch", "F", "nn", "functional", "np", "numpy")
        is_class = layer is None and name[:1].isupper()
        return is_class or (is_library and not (name in _HAND_ON or _MAY_DO_NOTHING.search(name)))
    names_another = ast.Name | ast.Attribute | ast.Subscript | ast.IfExp
    return not isinstance(value, names_another)


def _what(fact: TensorFact, kind: ObservationKind) -> str:
    if kind == "device":
        return f"on {fact.device}"
    return fact.dtype if kind == "dtype" else format_shape(fact.shape)


def _made_of(fact: TensorFact, trial: Trial) -> Iterator[tuple[str, Binding]]:
    """Yield where the tensor or layer was made that an expression starts with."""
    node = fact.node
    while isinstance(node, ast.Compare | ast.Subscript | ast.Call):
        if isinstance(node, ast.Call):
            if layer := trial.binding(ast.unparse(node.func)):
                yield ast.unparse(node.func), layer
                return
            node = node.func.value if isinstance(node.func, ast.Attribute) else None
        else:
            node = node.left if isinstance(node, ast.Compare) else node.value
    if isinstance(node, ast.Name | ast.Attribute):
        made = trial.binding(name := ast.unparse(node), of_shape=True)
        if made is not None:
            yield name, made


# --- autograd -------------------------------------------------------------------------------------


def _writes(evidence: Evidence) -> Iterator[Observation]:
    """Yield the line that saved the tensor, and each line that changed it since."""
    change = evidence.modified
    assert change is not None
    name = f" {change.name}" if change.name else ""
    for step in change.savers:
        if step.source is not None and step.source.line is not None:
            text = f"{place(step.source, evidence)} needs{name or ' it'} in backward"
            text += f": {step.source.text}"
            source = marked(step.source, f"needs{name or ' its values'} in backward")
            yield Observation(kind="write", text=text, facts={"op": step.op}, sources=(source,))
    writes = change.writes or ((change.modified,) if change.modified is not None else ())
    is_again = False
    for step in writes:
        if step is None or step.source is None or step.source.line is None:
            continue
        again = " again" if is_again else ""
        text = f"{place(step.source, evidence)} changes{name or ' it'}{again}: {step.source.text}"
        source = marked(step.source, f"changes{name or ' it'}{again}")
        yield Observation(kind="write", text=text, facts={"op": step.op}, sources=(source,))
        is_again = True


def _graph(evidence: Evidence) -> Iterator[Observation]:
    """Yield what made a part of the graph, what freed it, and what led back to it."""
    freed, here = evidence.freed, evidence.source
    assert freed is not None and freed.made is not None
    made = _here(freed.made, evidence)
    text = f"{place(made, evidence)} made this part of the graph: {made.text}"
    source = marked(made, "this part of the graph is made here")
    yield Observation(kind="graph", text=text, facts={"node": freed.node}, sources=(source,))
    if freed.freed is not None:
        line = _here(freed.freed, evidence)
        is_same = here is not None and line.line == here.line
        when = " in an earlier pass" if is_same else ""
        text = f"{place(line, evidence)} freed it{when}: {line.text}"
        source = marked(line, f"freed it{when}")
        yield Observation(kind="graph", text=text, facts={"node": freed.node}, sources=(source,))
    if freed.read is not None:
        line, name = _here(freed.read, evidence), freed.name or "it"
        text = f"{place(line, evidence)} used {name} after that: {line.text}"
        source = marked(line, f"uses {name} of before")
        yield Observation(kind="graph", text=text, facts={"name": freed.name}, sources=(source,))


def _here(line: LineRef, evidence: Evidence) -> LineRef:
    """Return a line with the failing line's cell and file, if it has none."""
    here = evidence.source
    if here is None or line.cell is not None or line.file is not None:
        return line
    return LineRef(line=line.line, text=line.text, cell=here.cell, file=here.file)
