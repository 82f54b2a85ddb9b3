"""Reports made by hand: valid defaults, one field overridden at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from cudalens.core.report import (
    AutogradNeighbourhood,
    Bounds,
    CodeLine,
    Environment,
    Frame,
    GraphEdge,
    GraphNode,
    Hint,
    Histogram,
    HistoryEntry,
    LineRef,
    Offender,
    OffenderMap,
    Offenders,
    OpName,
    ProvenanceStep,
    Replay,
    Report,
    SourceSpan,
    TensorFact,
    TensorSummary,
    Timing,
)
from cudalens.core.report_types import Expression
from cudalens.diagnosis.user_code import parsed

_BATCH = (4, 9, 3, 6, 8, 2, 1, 8, 5, 9, 4, 4, 8, 9, 9, 8, 7, 10, 4, 3, 10, 7, 1, 2, 3, 1, 5, 1, 5)
LABELS = (*_BATCH, 8, 7, 10)
CELL = (
    "for x, y in loader:",
    '    x, y = x.to("cuda"), y.to("cuda")',
    "    logits = net(x)",
    "    loss = F.cross_entropy(logits, y)",
    "    loss.backward()",
)
ENVIRONMENT = Environment(
    cudalens="0.1.0", python="3.11.9", torch="2.13.0", cuda="12.9", device="NVIDIA H200"
)


NOTHING_ELSE: dict[str, Any] = {
    "replay": Replay(outcome="returned"),
    "device_text": None,
    "graph": AutogradNeighbourhood(),
    "provenance": (),
    "hints": (),
}


def source(lines: tuple[str, ...], at: int, call: str, *, first: int = 9, cell: int = 7) -> Any:
    """Return the span of ``call`` on line number ``first + at`` of a cell."""
    text = lines[at]
    column = text.index(call)
    return SourceSpan(
        cell=cell,
        line=first + at,
        end_line=first + at,
        column=column,
        end_column=column + len(call),
        text=text.strip(),
        context=tuple(CodeLine(line=first + i, text=line) for i, line in enumerate(lines)),
    )


def spelled(text: str | None) -> Expression | None:
    """Return an expression as the reader of the line makes it."""
    return None if text is None else Expression(text, parsed(text))


def fact(argument: str | None, kind: str, expression: str | None = None, **facts: Any) -> Any:
    dtype, _, sizes = kind.partition("[")
    shape = tuple(int(size) for size in sizes.rstrip("]").split(",") if size)
    return TensorFact(
        argument=argument, expression=spelled(expression), shape=shape, dtype=dtype, **facts
    )


def tensor(
    line: str, number: int, argument: str | None, expression: str, kind: str, **facts: Any
) -> Any:
    """Return a tensor of a kind whose ``expression`` stands last in ``line``."""
    column = line.rindex(expression)
    span = (number, column, column + len(expression))
    return fact(argument, kind, expression, span=span, **{"device": "cuda:0", **facts})


def op_name(name: str, api: str | None) -> OpName:
    return OpName(name=name, overload="default", api=api)


def user_frame(file: str, line: int, function: str, text: str, cell: int | None = None) -> Frame:
    return Frame(file=file, line=line, function=function, text=text, is_user=True, cell=cell)


def raised(exception: str, message: str) -> Replay:
    return Replay(outcome="raised", exception=exception, message=message)


def offenders(total: int, count: int, **values: Any) -> Offenders:
    """Return bad values by their positions."""
    first = [Offender(position=at, value=value) for at, value in values.pop("first")]
    return Offenders(count=count, total=total, first=tuple(first), **values)


def one_row(values: tuple[Any, ...], bad: tuple[int, ...]) -> OffenderMap:
    return OffenderMap(rows=1, columns=len(values), bad=bad, low=values, high=values)


def node(id: str, op: str, role: str = "upstream", **facts: Any) -> GraphNode:
    """Return one graph node called after its op."""
    name = facts.pop("name", op.removeprefix("aten::").title().replace("_", "") + "Backward0")
    return GraphNode(id=id, name=name, op=op, role=role, **facts)  # type: ignore[arg-type]


def chain(*ids: str) -> tuple[GraphEdge, ...]:
    return tuple(GraphEdge(src=a, dst=b) for a, b in pairwise(ids))


def in_a_row(*nodes: GraphNode) -> AutogradNeighbourhood:
    """Return nodes of which each feeds the next one."""
    ids = [item.id for item in nodes]
    return AutogradNeighbourhood(nodes=nodes, edges=chain(*ids), focus=ids[-1])


def small_graph() -> AutogradNeighbourhood:
    """Return the graph of the default report: a small net, its labels and the failed loss."""
    line = LineRef(line=11, text="logits = net(x)", cell=7)
    nodes = (
        node("n0", "aten::convolution", shape=(32, 16, 98), module_path="net.0", source=line),
        node("n1", "aten::mean", shape=(32, 16), module_path="net.2", source=line),
        node("n2", "aten::addmm", shape=(32, 10), module_path="net.3", source=line),
        node("n3", "", "bad_input", name="y", shape=(32,), dtype="int64"),
        node("n4", "aten::nll_loss_forward", "failed", name="NllLossBackward0"),
        node("n5", "", "parameter", name="net.3.weight", shape=(10, 16), dtype="float32"),
        node("n6", "", "parameter", name="net.3.bias", shape=(10,), dtype="float32"),
    )
    edges = (
        *chain("n0", "n1", "n2", "n4"),
        GraphEdge(src="n3", dst="n4", input=1),
        GraphEdge(src="n6", dst="n2", input=0),
        GraphEdge(src="n5", dst="n2", input=2),
    )
    return AutogradNeighbourhood(nodes=nodes, edges=edges, focus="n4", total_nodes=23)


def make_report(**overrides: Any) -> Report:
    """Return the report of a cross-entropy with labels from 1 to 10, with ``overrides``."""
    bad = [at for at, value in enumerate(LABELS) if value == 10]
    if "headline" in overrides:
        overrides.setdefault("headline_schema", overrides["headline"])
    return replace(
        Report(
            kind="device_assert",
            certainty="proven",
            prevented=True,
            context_usable=True,
            phase="forward",
            headline="y[17] = 10 is outside the 10 classes of logits",
            headline_schema="target[17] = 10 is outside the 10 classes of input",
            explanation="Each label picks one of the 10 columns of logits. The kernel checks it "
            "on the device, where a failed check ends the CUDA context of the whole process.",
            op=op_name("aten::nll_loss_forward", "torch.nn.functional.cross_entropy"),
            argument="target",
            expression="y",
            offenders=offenders(
                32,
                3,
                first=[((at,), 10) for at in bad],
                map=one_row(LABELS, tuple(int(value == 10) for value in LABELS)),
            ),
            bounds=Bounds(min=0, max=9, also_allowed=(-100,), text="0 … 9 or -100 (ignore_index)"),
            source=source(CELL, 3, "F.cross_entropy(logits, y)"),
            frames=(
                user_frame("<ipython-input-7>", 12, "<module>", CELL[3].strip(), 7),
                Frame(
                    file="/site-packages/torch/nn/functional.py",
                    line=3494,
                    function="cross_entropy",
                    text="return torch._C._nn.cross_entropy_loss(",
                ),
            ),
            replay=raised("IndexError", "Target 10 is out of bounds."),
            device_text="Assertion `t >= 0 && t < n_classes` failed.",
            tensors=_label_tensors(),
            graph=small_graph(),
            provenance=(
                ProvenanceStep(
                    op="aten::_to_copy",
                    source=LineRef(line=10, text='y.to("cuda")', cell=7),
                    note="out of bounds before it reached the device",
                ),
                ProvenanceStep(note="batch 4 of loader, row 17 = dataset[145]"),
            ),
            history=_history(),
            hints=(
                Hint(
                    text="the labels run from 1 to 10: they look 1-based",
                    fix="F.cross_entropy(logits, y - 1)",
                    tried=True,
                    rule="one_based_labels",
                ),
            ),
            environment=ENVIRONMENT,
            timing=Timing(checked_ops=4, recorded_ops=412, diagnose_s=0.03),
        ),
        **overrides,
    )


def _label_tensors() -> tuple[TensorFact, ...]:
    scores = TensorSummary(min=-2.125, max=3.0625, mean=0.09375, nan=0, inf=0)
    values = TensorSummary(
        min=1,
        max=10,
        mean=5.375,
        nan=0,
        inf=0,
        unique=tuple(sorted(set(LABELS))),
        histogram=Histogram(
            edges=tuple(0.5 + at for at in range(11)),
            counts=tuple(LABELS.count(at) for at in range(1, 11)),
        ),
    )
    of_scores = {"stride": (10, 1), "requires_grad": True, "grad_fn": "AddmmBackward0"}
    return (
        tensor(CELL[3], 12, "input", "logits", "float32[32, 10]", summary=scores, **of_scores),
        tensor(CELL[3], 12, "target", "y", "int64[32]", summary=values, stride=(1,)),
    )


def _history() -> tuple[HistoryEntry, ...]:
    line = LineRef(line=11, text="logits = net(x)", cell=7)
    ops = (
        ("aten::convolution", "f32[32, 1, 100], f32[16, 1, 3]", "net.0", "Conv1d"),
        ("aten::relu", "f32[32, 16, 98]", "net.1", "ReLU"),
        ("aten::mean.dim", "f32[32, 16, 98]", "net.2", "Mean"),
        ("aten::addmm", "f32[10], f32[32, 16], f32[16, 10]", "net.3", "Linear"),
        ("aten::_log_softmax", "f32[32, 10]", None, None),
    )
    return entries(408, ops, source=line)


def entries(first: int, ops: tuple[Any, ...], **facts: Any) -> tuple[HistoryEntry, ...]:
    """Return a history from op, shapes, module path and module type of each call."""
    return tuple(
        HistoryEntry(seq=at, op=op, shapes=shapes, module_path=path, module_type=kind, **facts)
        for at, (op, shapes, path, kind) in enumerate(ops, first)
    )


def bert_graph() -> AutogradNeighbourhood:
    """Return a neighbourhood of 41 nodes: one encoder layer behind an embedding's backward."""
    ops = (
        ("aten::embedding", "bert.embeddings.word_embeddings", (8, 128, 64)),
        ("aten::add.Tensor", "bert.embeddings", (8, 128, 64)),
        ("aten::native_layer_norm", "bert.embeddings.LayerNorm", (8, 128, 64)),
        ("aten::native_dropout", "bert.embeddings.dropout", (8, 128, 64)),
        ("aten::addmm", "bert.encoder.layer.0.attention.self.query", (1024, 64)),
        ("aten::view", "bert.encoder.layer.0.attention.self", (8, 4, 128, 16)),
        ("aten::bmm", "bert.encoder.layer.0.attention.self", (32, 128, 128)),
        ("aten::_softmax", "bert.encoder.layer.0.attention.self", (8, 4, 128, 128)),
        ("aten::bmm", "bert.encoder.layer.0.attention.self", (32, 128, 16)),
        ("aten::addmm", "bert.encoder.layer.0.attention.output.dense", (1024, 64)),
        ("aten::add.Tensor", "bert.encoder.layer.0.attention.output", (8, 128, 64)),
        ("aten::native_layer_norm", "bert.encoder.layer.0.attention.output", (8, 128, 64)),
        ("aten::addmm", "bert.encoder.layer.0.intermediate.dense", (1024, 256)),
        ("aten::gelu", "bert.encoder.layer.0.intermediate", (8, 128, 256)),
        ("aten::addmm", "bert.encoder.layer.0.output.dense", (1024, 64)),
        ("aten::add.Tensor", "bert.encoder.layer.0.output", (8, 128, 64)),
        ("aten::native_layer_norm", "bert.encoder.layer.0.output.LayerNorm", (8, 128, 64)),
        ("aten::select.int", "bert.pooler", (8, 64)),
        ("aten::addmm", "bert.pooler.dense", (8, 64)),
        ("aten::tanh", "bert.pooler", (8, 64)),
        ("aten::addmm", "classifier", (8, 2)),
    )
    nodes = [node(f"n{at}", op, module_path=m, shape=s) for at, (op, m, s) in enumerate(ops)]
    edges = list(chain(*(item.id for item in nodes)))
    edges += [GraphEdge(src="n3", dst="n10", input=1), GraphEdge(src="n11", dst="n15", input=1)]
    for at, (op, module, _) in enumerate(ops):
        if op in ("aten::addmm", "aten::native_layer_norm"):
            for part in ("weight", "bias"):
                key = f"p{at}{part[0]}"
                name = f"{module}.{part}"
                nodes.append(node(key, "", "parameter", name=name, shape=(64, 64)))
                edges.append(GraphEdge(src=key, dst=f"n{at}", input=1 + (part == "bias")))
    nodes.append(node("bad", "", "bad_input", name="labels", shape=(8,)))
    nodes.append(node("lost", "aten::nll_loss_forward", "failed"))
    edges += [*chain("n20", "lost"), GraphEdge(src="bad", dst="lost", input=1)]
    return AutogradNeighbourhood(
        nodes=tuple(nodes), edges=tuple(edges), focus="lost", total_nodes=950
    )


def segmentation() -> Report:
    """Return a report of masks with 255 in their borders, found in two dimensions."""
    rows, columns = 24, 48
    bad = tuple(
        4 * int(row in (0, 23) or (row, column) in ((5, 7), (6, 7), (6, 8), (14, 40)))
        for row in range(rows)
        for column in range(columns)
    )
    lines = ("for x, mask in loader:", "    loss = F.cross_entropy(net(x), mask)")
    span = source(lines, 1, "F.cross_entropy(net(x), mask)", first=3, cell=4)
    summary = TensorSummary(min=0, max=255, mean=26.5, unique=(0, 3, 15, 20, 255))
    return make_report(
        headline="mask[0, 0, 0] = 255 is outside the 21 classes of input: allowed 0 … 20, or -100",
        explanation="255 marks the pixels that no class was given to.",
        op=op_name("aten::nll_loss2d_forward", "torch.nn.functional.cross_entropy"),
        expression="mask",
        offenders=offenders(
            4608,
            400,
            first=[((0, at // 12, at % 12), 255) for at in range(20)],
            map=OffenderMap(
                rows=rows,
                columns=columns,
                bad=bad,
                low=tuple(255 if item else 0 for item in bad),
                high=tuple(255 if item else 20 for item in bad),
            ),
        ),
        bounds=Bounds(min=0, max=20, also_allowed=(-100,), text="0 … 20 or -100 (ignore_index)"),
        source=span,
        tensors=(
            tensor(lines[1], 4, "target", "mask", "int64[24, 16, 12]", summary=summary),
            fact("input", "float32[24, 21, 16, 12]", device="cuda:0"),
        ),
        graph=AutogradNeighbourhood(),
        replay=raised("IndexError", "Target 255 is out of bounds."),
        provenance=(),
        hints=(
            Hint(
                text="255 is the usual mark of pixels to ignore",
                fix="F.cross_entropy(net(x), mask, ignore_index=255)",
                rule="ignore_255",
            ),
        ),
    )


def host_error() -> Report:
    """Return a report of a shape mismatch that torch raised itself, CUDA not looked at."""
    lines = ("h = encoder(x)", "scores = torch.matmul(h, queries)")
    return Report(
        kind="host_error",
        certainty="proven",
        phase="forward",
        headline="h has 64 columns, queries has 32 rows: matmul needs the same number",
        explanation="The columns of the first matrix must equal the rows of the second.",
        op=op_name("aten::matmul", "torch.matmul"),
        argument="other",
        expression="queries",
        source=source(lines, 1, "torch.matmul(h, queries)", first=1, cell=3),
        frames=(user_frame("<ipython-input-3>", 2, "<module>", lines[1], 3),),
        replay=raised(
            "RuntimeError",
            "Expected size for first two dimensions of batch2 tensor to be: [4, 64] "
            "but got: [4, 32].",
        ),
        tensors=(
            tensor(lines[1], 2, "self", "h", "float32[4, 12, 64]", requires_grad=True),
            tensor(lines[1], 2, "other", "queries", "float32[4, 32, 7]"),
        ),
        hints=(Hint(text="the two differ in the width of a head", rule="matmul_inner"),),
        environment=ENVIRONMENT,
        timing=Timing(checked_ops=0, recorded_ops=7),
    )


def mismatch() -> Report:
    """Return a report of a layer that is given too few features, with the calls before it."""
    calls = (
        ("aten::convolution", "f32[32, 1, 100], f32[16, 1, 3] -> f32[32, 16, 98]", "0", "Conv1d"),
        ("aten::relu", "f32[32, 16, 98] -> f32[32, 16, 98]", "1", "ReLU"),
        ("aten::detach", "f32[32, 16, 98] -> f32[32, 16, 98]", "1", "ReLU"),
        ("aten::view", "f32[32, 16, 98] -> f32[32, 1568]", "2", "Flatten"),
        ("aten::t", "f32[10, 784] -> f32[784, 10]", "3", "Linear"),
    )
    lines = ("x = torch.randn(32, 1, 100)", "out = net(x)")
    return Report(
        kind="host_error",
        certainty="proven",
        phase="forward",
        headline="input has 1568 features in its last dimension, Linear net.3 takes 784",
        op=op_name("aten::addmm", "torch.nn.functional.linear"),
        argument="input",
        module_path="3",
        source=source(lines, 1, "net(x)", first=1, cell=4),
        tensors=(
            fact("input", "float32[32, 1568]", device="cpu"),
            fact("weight", "float32[10, 784]", device="cpu"),
        ),
        history=entries(1, calls),
        environment=ENVIRONMENT,
    )


def autograd_error() -> Report:
    """Return a report of an in-place change found by backward, on the simulated device."""
    return Report(
        kind="autograd_error",
        certainty="likely",
        context_usable=True,
        phase="backward",
        headline="h, needed by the backward of sigmoid, was changed in place after it was saved",
        op=op_name("aten::sigmoid", "torch.Tensor.backward"),
        source=source(("loss = h.sum()", "loss.backward()"), 1, "loss.backward()", first=5),
        forward_source=SourceSpan(cell=7, line=3, end_line=3, text="h = torch.sigmoid(z)"),
        module_path="gate",
        provenance=(
            ProvenanceStep(
                op="aten::add_.Tensor",
                source=LineRef(line=4, text="h += 1", cell=7),
                note="changed it from version 0 to version 1",
            ),
        ),
        hints=(Hint(text="make a new tensor instead", fix="h = h + 1", rule="inplace"),),
        environment=replace(ENVIRONMENT, device="simulated", simulated=True),
        limits=("graph unavailable: its buffers were freed",),
    )


def silent() -> Report:
    """Return a report of a finding that stops nothing: probabilities that do not sum to one."""
    values = (0.5, -0.25, 0.75, 0.0, 1.0, "nan")
    lines = ("probs = torch.softmax(logits, 0)", "pick = torch.multinomial(probs, 1)")
    return make_report(
        kind="silent",
        prevented=False,
        headline="probs[0, 1] = -0.25 is negative: the draw does not follow these weights",
        explanation="Neither the CPU nor CUDA complains here, but the samples are wrong.",
        op=op_name("aten::multinomial", "torch.multinomial"),
        argument="self",
        expression="probs",
        offenders=offenders(
            6,
            2,
            first=[((0, 1), -0.25), ((1, 2), float("nan"))],
            map=OffenderMap(rows=2, columns=3, bad=(0, 1, 0, 0, 0, 1), low=values, high=values),
        ),
        bounds=Bounds(min=0, text="at least 0"),
        source=source(lines, 1, "torch.multinomial(probs, 1)", first=1, cell=2),
        tensors=(tensor(lines[1], 2, "self", "probs", "float32[2, 3]"),),
        **NOTHING_ELSE,
        frames=(),
        history=(),
    )


def lost_context() -> Report:
    """Return a report of an illegal memory access in an op of an extension: the context is gone."""
    return Report(
        kind="cuda_error",
        certainty="likely",
        prevented=False,
        context_usable=False,
        phase="forward",
        headline="mylib::gather_rows stopped with an illegal memory access",
        explanation="The op ran last before the first CUDA error was reported, and CUDA was "
        "synchronized after each op.",
        op=op_name("mylib::gather_rows", "mylib.gather_rows"),
        source=SourceSpan(
            file="/home/ada/train.py", line=41, end_line=41, text="rows = mylib.gather_rows(t, i)"
        ),
        frames=(
            user_frame("/home/ada/train.py", 77, "main", "step(batch)"),
            user_frame("/home/ada/train.py", 41, "step", "rows = mylib.gather_rows(t, i)"),
        ),
        device_text="CUDA error: an illegal memory access was encountered",
        tensors=(
            fact("t", "float16[100, 8]", "t", device="cuda"),
            fact("i", "int32[32]", "i", device="cuda"),
        ),
        replay=Replay(reason="mylib::gather_rows has no CPU kernel"),
        history=_history(),
        environment=replace(ENVIRONMENT, rank=3),
        limits=("the bad index is unknown: values cannot be read after the context is lost",),
    )


def bert_backward() -> Report:
    """Return a report found while backward ran, deep in a large model."""
    lines = (
        "out = model(**batch)",
        "loss = F.cross_entropy(out.logits, labels)",
        "loss.backward()",
    )
    return make_report(
        phase="backward",
        explanation="The forward call kept the labels; its backward reads them again.",
        headline="labels[5] = 2 is outside the 2 classes of out.logits: allowed 0 … 1, or -100",
        op=op_name("aten::nll_loss_backward", "torch.Tensor.backward"),
        expression=None,
        offenders=offenders(8, 1, first=[((5,), 2)]),
        bounds=Bounds(min=0, max=1, also_allowed=(-100,)),
        source=source(lines, 2, "loss.backward()", first=1, cell=12),
        forward_source=SourceSpan(cell=12, line=2, end_line=2, text=lines[1]),
        module_path="bert.encoder.layer.0.output",
        tensors=(),
        graph=bert_graph(),
        replay=Replay(reason="the CPU kernel does not check"),
        provenance=(),
        hints=(),
    )


def nonfinite() -> Report:
    """Return a report of the first non-finite result, on a statement of several lines."""
    lines = (
        "with torch.autocast('cuda'):",
        "    weights = torch.exp(",
        "        scores",
        "    )",
        "    loss = weights.mean()",
    )
    span = source(lines, 1, "torch.exp(", first=1, cell=21)
    summary = TensorSummary(min=-3.5, max=120.0, mean=0.5, nan=0, inf=0)
    infinite = tuple(int(at in (3, 90)) for at in range(64))
    return make_report(
        kind="nonfinite",
        prevented=False,
        headline="exp gave inf at [7]: scores reaches 120, exp overflows beyond 88.7",
        explanation="",
        op=op_name("aten::exp", "torch.exp"),
        argument=None,
        expression=None,
        offenders=offenders(
            128,
            2,
            first=[((7,), float("inf"))],
            map=OffenderMap(
                rows=1,
                columns=64,
                bad=infinite,
                low=tuple(0.25 + at % 5 for at in range(64)),
                high=tuple("inf" if bad else 1.5 + at % 5 for at, bad in enumerate(infinite)),
            ),
        ),
        bounds=None,
        source=replace(span, end_line=4, end_column=5),
        tensors=(tensor(lines[2], 3, "self", "scores", "bfloat16[128]", summary=summary),),
        **NOTHING_ELSE,
    )


def long_line() -> Report:
    """Return a report whose failing line is 128 columns long, its bad tensor at the end."""
    line = (
        "        loss = F.cross_entropy(self.decoder(self.encoder(tokens, mask=padding), memory)"
        ".view(-1, vocabulary), targets.view(-1))"
    )
    call = line[line.index("F.") :]
    return make_report(
        expression="targets.view(-1)",
        source=source((CELL[0], line), 1, call),
        tensors=(
            tensor(line, 10, "input", call[16:-18], "float32[32, 10]"),
            tensor(line, 10, "target", "targets.view(-1)", "int64[32]"),
        ),
    )


REPRESENTATIVE = {
    "labels": make_report,
    "segmentation": segmentation,
    "long_line": long_line,
    "host_error": host_error,
    "mismatch": mismatch,
    "autograd_error": autograd_error,
    "silent": silent,
    "lost_context": lost_context,
    "bert_backward": bert_backward,
    "nonfinite": nonfinite,
    "blank": Report,
}
"""Name of a golden file to what builds its report."""
