"""Reports made by hand: valid defaults, one field overridden at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudalens.model import (
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

LABELS = (4, 9, 3, 6, 8, 2, 1, 8, 5, 9, 4, 4, 8, 9, 9, 8, 7, 10, 4, 3, 10, 7, 1, 2, 3, 1, 5, 1, 5)
LABELS = (*LABELS, 8, 7, 10)
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


def source(lines: tuple[str, ...], at: int, call: str, *, first: int = 9, cell: int = 7) -> Any:
    """Give the span of ``call`` on line number ``first + at`` of a cell."""
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


def tensor(line: str, number: int, argument: str | None, expression: str, **facts: Any) -> Any:
    """Give a tensor whose ``expression`` stands last in ``line``."""
    column = line.rindex(expression)
    span = (number, column, column + len(expression))
    defaults: dict[str, Any] = {"device": "cuda:0"}
    return TensorFact(
        argument=argument, expression=expression, span=span, **{**defaults, **facts}
    )


def node(id: str, op: str, role: str = "upstream", **facts: Any) -> GraphNode:
    """Give one graph node called after its op."""
    name = facts.pop("name", op.removeprefix("aten::").title().replace("_", "") + "Backward0")
    return GraphNode(id=id, name=name, op=op, role=role, **facts)  # type: ignore[arg-type]


def chain(*ids: str) -> tuple[GraphEdge, ...]:
    """Give the edges from each node to the next."""
    return tuple(GraphEdge(src=a, dst=b) for a, b in zip(ids, ids[1:], strict=False))


def small_graph() -> AutogradNeighbourhood:
    """Give the graph of the default report: a small net, its labels and the failed loss."""
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
    """Give the report of a cross-entropy with labels from 1 to 10, with ``overrides``."""
    bad = [at for at, value in enumerate(LABELS) if value == 10]
    return replace(
        Report(
            kind="device_assert",
            certainty="proven",
            prevented=True,
            context_usable=True,
            phase="forward",
            headline="y[17] = 10 is outside the 10 classes of logits: allowed 0 … 9, or -100",
            explanation="Each label picks one of the 10 columns of logits. The kernel checks it "
            "on the device, where a failed check ends the CUDA context of the whole process.",
            op=OpName(
                name="aten::nll_loss_forward",
                overload="default",
                api="torch.nn.functional.cross_entropy",
            ),
            argument="target",
            expression="y",
            offenders=Offenders(
                count=3,
                total=32,
                first=tuple(Offender(position=(at,), value=10) for at in bad),
                map=OffenderMap(
                    rows=1,
                    columns=32,
                    bad=tuple(int(value == 10) for value in LABELS),
                    low=LABELS,
                    high=LABELS,
                ),
            ),
            bounds=Bounds(
                min=0, max=9, also_allowed=(-100,), text="0 … 9 or -100 (ignore_index)"
            ),
            source=source(CELL, 3, "F.cross_entropy(logits, y)"),
            frames=(
                Frame(
                    file="<ipython-input-7>",
                    line=12,
                    function="<module>",
                    text="loss = F.cross_entropy(logits, y)",
                    is_user=True,
                    cell=7,
                ),
                Frame(
                    file="/site-packages/torch/nn/functional.py",
                    line=3494,
                    function="cross_entropy",
                    text="return torch._C._nn.cross_entropy_loss(",
                ),
            ),
            replay=Replay(
                outcome="raised", exception="IndexError", message="Target 10 is out of bounds."
            ),
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
                    rule="one_based_labels",
                ),
            ),
            environment=ENVIRONMENT,
            timing=Timing(checked_ops=4, recorded_ops=412, diagnose_s=0.03),
        ),
        **overrides,
    )


def _label_tensors() -> tuple[TensorFact, ...]:
    line = CELL[3]
    return (
        tensor(
            line,
            12,
            "input",
            "logits",
            shape=(32, 10),
            dtype="float32",
            stride=(10, 1),
            requires_grad=True,
            grad_fn="AddmmBackward0",
            summary=TensorSummary(min=-2.125, max=3.0625, mean=0.09375, nan=0, inf=0),
        ),
        tensor(
            line,
            12,
            "target",
            "y",
            shape=(32,),
            dtype="int64",
            stride=(1,),
            summary=TensorSummary(
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
            ),
        ),
    )


def _history() -> tuple[HistoryEntry, ...]:
    line = LineRef(line=11, text="logits = net(x)", cell=7)
    ops = (
        ("aten::convolution", "f32[32, 1, 100], f32[16, 1, 3]", "net.0"),
        ("aten::relu", "f32[32, 16, 98]", "net.1"),
        ("aten::mean.dim", "f32[32, 16, 98]", "net.2"),
        ("aten::addmm", "f32[10], f32[32, 16], f32[16, 10]", "net.3"),
        ("aten::_log_softmax", "f32[32, 10]", None),
    )
    return tuple(
        HistoryEntry(seq=408 + at, op=op, shapes=shapes, source=line, module_path=module)
        for at, (op, shapes, module) in enumerate(ops)
    )
