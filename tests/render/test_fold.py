"""Folding of a neighbourhood: what is joined until it can be read, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace

from cudalens.core.report import AutogradNeighbourhood, GraphEdge, LineRef
from cudalens.render.fold import MAX_BOXES, MAX_EDGES, fold
from tests.builders import node


def test_an_unrolled_loop_is_folded_but_not_beside_the_failure() -> None:
    """Seven states that two lines carry on, each step from two states of the step before."""
    states, ops = 7, 45
    lines = [LineRef(line=at, cell=1, text="h = f(h)") for at in (4, 5)]
    steps = [
        replace(node(f"n{at}", f"torch.{'abc'[at % 3]}"), source=lines[at % 2]) for at in range(ops)
    ]
    edges = [
        GraphEdge(src=f"n{at - back}", dst=f"n{at}")
        for at in range(ops)
        for back in (states, states + 1)
        if at >= back
    ]
    edges += [GraphEdge(src=f"n{at}", dst="f") for at in range(ops - states, ops)]
    graph = AutogradNeighbourhood(
        nodes=(*steps, node("f", "aten::index", "failed")), edges=tuple(edges), focus="f"
    )
    boxes, links = fold(graph)
    assert len(boxes) <= MAX_BOXES and len(links) <= MAX_EDGES
    beside = [src for src, dst in links if dst == "f"]
    assert [len(boxes[key].members) for key in beside] == [1] * states
    farther = [len(boxes[key].members) for key in boxes.keys() - {*beside, "f"}]
    assert max(farther) > 1
    assert sum(farther) == ops - states
