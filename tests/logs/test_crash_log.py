"""Logs of crashed jobs: what is read from them, what is concluded, and what they do not show.

``tests/data/crash_logs.txt`` holds logs of public issues, each with its thread's address; they are
cut down to the lines that count, and folders of the writers are shortened.
"""

from __future__ import annotations

import textwrap
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudalens.core.report import Report
from cudalens.logs.crash_log import MAX_FAILURES, read_log
from cudalens.logs.log_verdict import explain_log, last_exception

FILE = Path(__file__).parents[1] / "data" / "crash_logs.txt"


def logs() -> Iterator[tuple[str, dict[str, list[str]], list[str]]]:
    """The logs of the file: address, what is expected, lines."""
    for block in FILE.read_text(encoding="utf-8").split("=== ")[1:]:
        head, _, text = block.partition("\n---\n")
        address, *expected = head.splitlines()
        wanted: dict[str, list[str]] = {}
        for line in expected:
            key, _, value = line.partition(": ")
            wanted.setdefault(key, []).append(value)
        yield address, wanted, text.splitlines()


LOGS = {address: (wanted, lines) for address, wanted, lines in logs()}


def explained(text: str) -> Report:
    found = explain_log(read_log(text.splitlines()))
    assert found is not None
    return found


def test_the_logs_of_the_file_are_many_and_some_do_not_show_it() -> None:
    certain = [wanted["certainty"][0] for wanted, _ in LOGS.values()]
    assert len(LOGS) >= 18
    assert min(certain.count("likely"), certain.count("unknown")) >= 6


@pytest.mark.parametrize("address", LOGS)
def test_a_log_of_a_public_issue(address: str) -> None:
    wanted, lines = LOGS[address]
    report = explain_log(read_log(lines))
    if wanted["certainty"] == ["none"]:
        assert report is None
        return
    assert report is not None
    assert [report.certainty] == wanted["certainty"]
    told = f"{report.headline_schema} {report.explanation}"
    for text in wanted.get("says", ()):
        assert text in told
    source = report.source
    place = "" if source is None else f"{source.file or f'In [{source.cell}]'} {source.line}"
    text = "" if source is None or not source.text else f" {source.text}"
    assert [f"{place}{text}"] == wanted.get("place", [""])
    rank = None if report.environment.rank is None else str(report.environment.rank)
    assert rank == wanted.get("rank", [None])[0]
    assert wanted["next"][0] in report.hints[-1].text
    assert report.to_text() and report.to_html() and Report.from_dict(report.to_dict()) == report


# --- several processes ----------------------------------------------------------------------------

ASSERT = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1284: indexSelectLargeIndex: block: [{0},0,0], "
    "thread: [{1},0,0] Assertion `srcIndex < srcSelectDimSize` failed."
)
TRACE = """\
Traceback (most recent call last):
  File "/work/train.py", line 40, in <module>
    main()
  File "/work/train.py", line 30, in main
    x = self.words(ids)
  File "/env/lib/python3.11/site-packages/torch/nn/functional.py", line 2542, in embedding
    return torch.embedding(weight, input, padding_idx, scale_grad_by_freq, sparse)
torch.AcceleratorError: CUDA error: device-side assert triggered
"""


def ended(error: str) -> str:
    """Return the traceback with another exception at its end."""
    return f"{TRACE.partition('torch.Acc')[0]}{error}\n"


def marked(rank: int, text: str) -> str:
    return textwrap.indent(text, f"[rank{rank}]: ", lambda line: True).removesuffix("\n")


def interleaved(*texts: str) -> str:
    rows = zip(*(text.splitlines() for text in texts), strict=True)
    return "\n".join(line for row in rows for line in row)


def test_a_traceback_that_ends_in_the_op_names_it_and_the_line() -> None:
    report = explained(f"{ASSERT.format(1, 2)}\n{TRACE}")
    found = (report.op.name, report.op.api, report.argument)
    assert found == ("aten::embedding", "nn.Embedding", "indices")
    assert "its line is likely the one" in report.explanation
    assert report.source is not None and report.source.ref.where == "/work/train.py:30"
    assert [frame.is_user for frame in report.frames] == [True, True, False]
    assert report.hints[-1].text.startswith("next time: python -m cudalens /work/train.py finds")


def test_a_frame_of_the_rehearsal_device_in_a_checkout_is_not_the_users() -> None:
    """An assert of ``python train.py`` on the rehearsal device is raised in files of ours."""
    text = TRACE.replace("/env/lib/python3.11/site-packages/torch/nn/functional.py", "{}")
    ours, theirs = "/src/cudalens/cudalens/simulate/state.py", "/src/simulate/state.py"
    assert explained(text.format(ours)).source == explained(TRACE).source
    source = explained(text.format(theirs)).source
    assert source is not None and source.ref.where == f"{theirs}:2542"


def test_marked_ranks_are_told_apart_and_counted() -> None:
    other = TRACE.replace("line 30", "line 31").replace("embedding", "linear")
    nccl = "RuntimeError: NCCL communicator was aborted on rank 1."
    report = explained(
        f"{ASSERT.format(0, 0)}\n"
        + interleaved(marked(0, TRACE), marked(1, other), marked(3, TRACE))
        + f"\n[rank2]: {nccl}\n"
    )
    assert "Ranks 0, 1 and 3 report it." in report.explanation
    assert report.op.name == "aten::embedding"
    assert report.limits == ()
    assert "torchrun --nproc-per-node N -m cudalens /work/train.py" in report.hints[-1].text


def test_a_spawned_process_is_named_by_the_one_that_started_it() -> None:
    parent = ended("torch.multiprocessing.spawn.ProcessRaisedException: ")
    report = explained(f"{parent}\n-- Process 1 terminated with the following error:\n{TRACE}")
    assert report.environment.rank == 1
    assert report.kind == "device_assert"
    assert report.hints[-1].text.startswith("next time: python -m cudalens /work/train.py")


# --- what is no cause, and what is none of ours ---------------------------------------------------


def test_a_host_error_of_torchs_is_explained() -> None:
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 20x5)"
    report = explained(ended(error))
    assert (report.kind, report.certainty) == ("host_error", "proven")
    assert "names the op and its tensors" in report.hints[-1].text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", None),
        ("epoch 1\nloss 0.3\n", None),
        (ended("KeyError: 'x'"), "KeyError: 'x' at /work/train.py:30"),
        ("Traceback (most recent call last):\n", None),
    ],
)
def test_what_is_no_failure_of_cudas_gets_no_report(text: str, said: str | None) -> None:
    log = read_log(text.splitlines())
    assert explain_log(log) is None
    assert last_exception(log) == said


def test_a_job_that_ran_under_the_check_has_its_finding_in_the_log() -> None:
    found = "DeviceIndexError: ids[3] = 9 is outside the 5 rows of table (allowed 0 … 4)"
    nccl = "[rank1]: RuntimeError: NCCL communicator was aborted on rank 1."
    report = explained(ended(f"cudalens.core.errors.{found}\n{nccl}"))
    assert (report.certainty, report.prevented, report.kind) == ("proven", True, "device_assert")
    assert report.headline_schema == found.partition(": ")[2]
    assert report.source is not None and report.source.line == 30


RUN = ("/work/train.py", 30, "x = self.words(ids)")
GROUP = textwrap.indent(TRACE, "  | ").replace("  | Traceback", "  + Exception Group Traceback")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "RuntimeError              Traceback (most recent call last)\n"
            "Cell In[5], line 3\n      1 import torch\n----> 3 step(x, y)\n\n"
            "File /opt/lib/python3.10/site-packages/torch/nn/modules/module.py:1518, in "
            "Module._call_impl(self, *args)\n-> 1518     return forward_call(*args)\n\n"
            "RuntimeError: CUDA error: device-side assert triggered\n",
            (5, None, 3, "step(x, y)"),
        ),
        (GROUP, (None, *RUN)),
        (textwrap.indent(TRACE, "[default1]:"), (None, *RUN)),
        (textwrap.indent(TRACE, "1: "), (None, *RUN)),
    ],
    ids=["notebook", "exception group", "torchrun --tee", "srun -l"],
)
def test_other_forms_of_tracebacks(text: str, place: tuple[object, ...]) -> None:
    source = explained(text).source
    assert source is not None
    assert (source.cell, source.file, source.line, source.text) == place


@pytest.mark.parametrize(("width", "is_read"), [(80, True), (81, False)])
def test_the_prefix_of_a_logger_has_at_most_eighty_characters(width: int, is_read: bool) -> None:
    text = textwrap.indent(TRACE, f"{'a' * (width - 1)}:")
    assert (explain_log(read_log(text.splitlines())) is not None) is is_read


SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 20x5)"
FULL = ended("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
LOST = ended("KeyError: 'x'")
HINT = "Note: if you see 'CUDA error: device-side assert triggered', set CUDA_LAUNCH_BLOCKING=1\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (FULL, "cuda_error"),
        (f"{FULL}retrying with batch 8\n{ended(SHAPES)}", "host_error"),
        (f"{FULL}retrying with batch 8\n{LOST}", None),
        ("WARNING CUDA out of memory, skipping batch 17\ntraining finished\n", None),
        ("2026-01-02 10:00:00 ERROR CUDA out of memory. Tried to allocate 2 GiB\n", "cuda_error"),
        (f"{HINT}done\n", None),
        (f"{HINT}{LOST}", None),
        (f"{HINT}{TRACE}", "device_assert"),
        (f"{TRACE}{LOST}", "device_assert"),
        (f"{ended(SHAPES)}{TRACE}", "device_assert"),
    ],
    ids=[
        "out of memory", "retried, then shapes", "retried, then a KeyError", "skipped", "logged",
        "mentioned", "mentioned, then a KeyError", "mentioned and met", "an assert, then more",
        "a handled exception, then an assert",
    ],
)  # fmt: skip
def test_the_verdict_is_of_what_ended_the_job(text: str, kind: str | None) -> None:
    """A job can handle any exception and go on, but not one that ends the CUDA context."""
    report = explain_log(read_log(text.splitlines()))
    assert (report and report.kind) == kind


def told(report: Report) -> str:
    return " ".join(report.to_text().split())


def test_a_job_that_went_on_is_said_to_have_gone_on() -> None:
    passed = explained(f"{ASSERT.format(1, 2)}\n........\n8 passed in 3.1s\n")
    assert "the job went on without this process" in told(passed)
    assert "the process ended before it waited for the GPU" in told(passed)
    assert "No error follows" not in told(explained(f"{ASSERT.format(1, 2)}\n{TRACE}"))
    more = "\n".join(f"epoch {number} loss 0.3" for number in range(20))
    assert "if the job handled it" in told(explained(f"{FULL}{more}"))
    assert "if the job handled it" not in explained(f"{FULL}srun: exit code 1\n").explanation


def test_colours_inside_an_assertion_are_read_past() -> None:
    """As ``grep --color`` and log viewers leave them."""
    line = ASSERT.format(1, 2).replace("Assertion", "\x1b[01;31m\x1b[KAssertion\x1b[m\x1b[K")
    assert explained(f"{line}\n{TRACE}") == explained(f"{ASSERT.format(1, 2)}\n{TRACE}")


def test_advice_of_pytorchs_is_spoken_of_where_it_is_printed() -> None:
    said = "TORCH_USE_CUDA_DSA under it does not help"
    message = "torch.AcceleratorError: CUDA error: invalid device ordinal\n"
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    assert said in explained(ended(message + advice)).explanation
    assert said not in explained(ended(message)).explanation


@pytest.mark.parametrize(
    ("printed", "first"),
    [
        ("IndexKernelUtils.cu:19: vectorized_gather_kernel: {} Assertion `ind >=0 && ind < "
         'ind_dim_size && "vectorized gather kernel index out of bounds"` failed.', "nn.Embedding"),
        ("Loss.cu:200: nll: {} Assertion `t >= 0 && t < n_classes` failed.", "F.cross_entropy"),
    ],
)  # fmt: skip
def test_the_function_that_most_people_call_is_named_first(printed: str, first: str) -> None:
    late = TRACE.replace("self.words(ids)", "loss.item()").replace("embedding", "f")
    line = printed.format("block: [0,0,0], thread: [0,0,0]")
    assert explained(f"{line}\n{late}").headline.startswith((f"{first}, ", f"{first} or "))


INDEX = (
    "IndexKernel.cu:111: operator(): block: [0,0,0], thread: [0,0,0] Assertion `-sizes[i] <= index "
    '&& index < sizes[i] && "index out of bounds"` failed.'
)
LABEL = "Loss.cu:9: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0 && t < n_classes` failed."
LATE = """\
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    print(step(x, y).item())
torch.AcceleratorError: CUDA error: device-side assert triggered
"""
SCRIPT = """\
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        self.classes = nn.Linear(4, 2)
        self.loss = nn.CrossEntropyLoss()
        {init}

    def forward(self, x, y):
        {forward}

print(step(x, y).item())
{after}
"""


@pytest.mark.parametrize(
    ("init", "forward", "after", "fits"),
    [
        ("pass", "return self.loss(self.classes(x), y)", "", "self.loss(self.classes(x), y)"),
        ("pass", "return F.cross_entropy(x, y)", "", "F.cross_entropy(x, y)"),
        ("pass", "return F.cross_entropy(x, y) + self.loss(x, y)", "", None),
        ("pass", "return F.mse_loss(x, y)", "", None),
        ("pass", "return F.cross_entropy(x, y)", "F.nll_loss(x, y)", "F.cross_entropy(x, y)"),
        ("self.far = nn.NLLLoss()", "return self.far(x, y) + self.loss(x, y)", "", None),
    ],
    ids=["a module", "one", "two", "none", "one, and one that never ran", "two modules"],
)
def test_the_one_call_of_the_script_that_fits_is_named(
    init: str, forward: str, after: str, fits: str | None
) -> None:
    text = SCRIPT.format(init=init, forward=forward, after=after)
    log = read_log(f"{LABEL}\n{LATE}".splitlines())
    report = explain_log(log, lambda name: {"train.py": text.splitlines()}.get(name, []))
    assert report is not None and report.certainty == "likely"
    if fits is None:
        assert report.headline_schema.startswith(
            "F.cross_entropy or F.nll_loss asserted on the device"
        )
        assert report.op.name is None
        return
    assert report.headline_schema.startswith(
        f"{fits} in line 10 is the only call of train.py that fits the assert: target: a label is"
    )
    assert report.op.name == "aten::nll_loss_forward"
    assert report.source is not None and report.source.line == 12
    assert "may be an earlier line" in report.explanation


def test_a_script_that_is_another_by_now_is_not_read() -> None:
    text = SCRIPT.format(init="pass", forward="return F.cross_entropy(x, y)", after="")
    log = read_log(f"{LABEL}\n{LATE}".splitlines())
    for lines in (text.splitlines()[1:], [*text.splitlines()[:10], "print(1)"], ["def"]):
        report = explain_log(log, lambda name, lines=lines: lines)  # type: ignore[misc]
        assert report is not None and report.op.name is None


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("total = table[ids].sum().item()", "table[ids]"),
        ("total = (table[ids] + other[ids]).sum().item()", None),
        ("losses[epoch] += loss.item()", None),
        ("total = table[0, :n].sum().item()", None),
        ("total = table[mask > 0].sum().item()", None),
        ("for total in table[ids].tolist():", None),
        ("loss.item()", None),
    ],
)
def test_an_indexing_in_the_deepest_line_is_named(line: str, fits: str | None) -> None:
    report = explained(f"{INDEX}\n{LATE.replace('print(step(x, y).item())', line)}")
    first = f"{fits} in line 12 is the only call of that line that fits the assert: indices: "
    assert report.headline_schema.startswith(
        first if fits else "x[i], x[i] = y or Tensor.index_put_ "
    )


CELL = """\
AcceleratorError                          Traceback (most recent call last)
Cell In[5], line 4
      1 for x, y in batches:
      2     rows = table[x]
      3     {}
----> 4     print(rows.sum().item())

AcceleratorError: CUDA error: device-side assert triggered
"""


@pytest.mark.parametrize(("line", "fits"), [("scale = rows[0]", "table[x]"), ("rows[y] = 0", None)])
def test_the_lines_of_a_cell_that_a_log_shows_are_looked_at(line: str, fits: str | None) -> None:
    report = explained(f"{INDEX}\n{CELL.format(line)}")
    first = f"{fits} in line 2 is the only call of the lines shown that fits the assert: indices: "
    assert report.headline_schema.startswith(
        first if fits else "x[i], x[i] = y or Tensor.index_put_ "
    )
    assert report.source is not None and (report.source.cell, report.source.line) == (5, 4)


def test_of_several_cells_in_a_traceback_the_lines_of_the_deepest_are_kept() -> None:
    deeper = "----> 4     step(rows)\n\nCell In[3], line 7, in step(x)\n      6     y = x\n----> 7"
    log = read_log(CELL.format("").replace("----> 4", deeper, 1).splitlines())
    (failure,) = log.failures
    assert [(frame.cell, frame.line) for frame in failure.frames] == [(5, 4), (3, 7)]
    assert sorted(failure.cell_lines) == [6, 7]


@pytest.mark.parametrize(
    ("error", "is_next"),
    [
        ("RuntimeError: Found no NVIDIA driver on your system. Please check", False),
        ("AssertionError: Torch not compiled with CUDA enabled", False),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 9000)", False),
        ("RuntimeError: CUDA error: no kernel image is available for execution", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
    ],
)
def test_the_next_command_is_named_where_a_gpu_was_there(error: str, is_next: bool) -> None:
    rules = [item.rule for item in explained(ended(error)).hints]
    assert ("next_run" in rules) is is_next


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. retry\nepoch 2\n", True),
        ("torch.OutOfMemoryError: CUDA out of memory. retry\n", False),
        (FULL + "step\n" * 8, False),
        (FULL + "step\n" * 9, True),
    ],
)
def test_an_error_of_a_job_that_went_on_is_told_as_such(text: str, is_told: bool) -> None:
    """Without a traceback it was printed by the job, which was still running."""
    assert ("The log goes on after it" in told(explained(text))) is is_told


@pytest.mark.parametrize(("digits", "is_line"), [(9, True), (10, False), (100, False)])
def test_a_number_that_counts_no_lines_is_none(digits: int, is_line: bool) -> None:
    line = f'  File "train.py", line {"9" * digits}, in <module>\n    f(x)\n'
    error = "torch.OutOfMemoryError: CUDA out of memory."
    report = explained(f"Traceback (most recent call last):\n{line}{error}\n")
    assert (report.source is not None) is is_line
    assert "the GPU has no room" in report.to_text()


# --- large logs -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_millions_of_lines_cost_no_memory() -> None:
    """Equal ones and different ones, colours, a line without an end, ranks without number."""

    def lines() -> Iterator[str]:
        for number in range(60_000):
            yield ASSERT.format(number % 900, number)
            if number % 20 == 0:
                yield f"\x1b[31m[rank{number}]:\x1b[0m Traceback (most recent call last):"
                yield f'[rank{number}]:   File "/work/a{number}.py", line {number}, in f'
                yield f"[rank{number}]: ValueError: bad {'x' * 5000} CUDA {number}"
        yield "CUDA " + "y" * 5_000_000
        yield from TRACE.splitlines()

    tracemalloc.start()
    try:
        log = read_log(lines())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40e6
    assert len(log.failures) <= MAX_FAILURES
    (line,) = log.asserts
    assert line.count == 60_000
    assert "at least 900 blocks, at least 16384 threads" in line.text()
    report = explain_log(log)
    assert report is not None and report.op.name == "aten::embedding"


def test_odd_text_breaks_nothing() -> None:
    """Cut, repeated and shuffled logs are read as far as they go."""
    lines = [line for _, text in LOGS.values() for line in text]
    for step in (1, 2, 3, 7, 11):
        for start in range(0, len(lines), 29):
            report = explain_log(read_log([*lines[start::step], *lines[:start:step]]))
            assert report is None or report.to_text()
