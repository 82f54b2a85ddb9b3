"""Names the tests of one file: ``python -m tests.quick cudalens/guards/process.py``.

``cudalens/guards/process.py`` has ``tests/guards/test_process.py`` and ``test_process_*.py`` beside
it, and the files of ``OTHERS``: more that notice when it breaks, and take seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
OTHERS: Final[dict[str, str]] = {
    "__init__.py": "test_contract.py",
    "core/__init__.py": "test_architecture.py",
    "core/_compiler.py": "guards/test_compiled.py",
    "core/error_pages.py": "test_docs.py",
    "core/evidence_types.py": "diagnosis/test_observations.py evidence/test_marks.py",
    "core/graph_types.py": "evidence/test_autograd_graph.py diagnosis/test_observations.py",
    "core/report_types.py": (
        "core/test_report_schema.py core/test_tensor_values.py diagnosis/test_observations.py"
    ),
    "core/source_places.py": "source/test_locate.py core/test_report.py",
    "core/version.py": "test_main.py",
    "diagnosis/__init__.py": "test_architecture.py",
    "diagnosis/assert_meanings.py": "diagnosis/test_assert_verdict.py logs/test_fitting_call.py",
    "diagnosis/hints/__init__.py": "diagnosis/hints/test_hints.py",
    "diagnosis/hints/_base.py": "diagnosis/hints/test_hints.py",
    "diagnosis/host_errors/__init__.py": "diagnosis/host_errors/test_host_errors.py",
    "diagnosis/host_errors/arguments.py": "diagnosis/host_errors/test_host_errors.py",
    "diagnosis/host_errors/sentences.py": "diagnosis/host_errors/test_host_errors.py",
    "evidence/__init__.py": "test_architecture.py",
    "guards/__init__.py": "guards/test_register.py",
    "guards/_base.py": "guards/test_register.py guards/test_ranges.py",
    "guards/catalogue/__init__.py": "guards/test_register.py",
    "guards/catalogue/_dims.py": "guards/catalogue/test_indexing.py guards/test_catalogue.py",
    "guards/catalogue/along_dim.py": "guards/catalogue/test_indexing.py guards/test_catalogue.py",
    "guards/catalogue/assertions.py": "guards/test_other.py guards/test_catalogue.py",
    "guards/catalogue/embedding.py": "guards/test_catalogue.py",
    "guards/catalogue/pooling.py": "guards/test_catalogue.py",
    "guards/catalogue/segments.py": "guards/test_other.py guards/test_catalogue.py",
    "guards/catalogue/sparse.py": "guards/test_catalogue.py",
    "guards/host_waits.py": "session/test_sync_debug.py guards/test_deferred.py",
    "guards/past_calls.py": "guards/test_deferred.py",
    "guards/pending.py": "guards/test_deferred.py",
    "guards/plans.py": "guards/test_ranges.py guards/test_register.py",
    "guards/process.py": "guards/test_register.py session/test_threads.py",
    "guards/refused_calls.py": "guards/test_interceptor.py",
    "integrations/__init__.py": "test_architecture.py",
    "integrations/lightning.py": "integrations/test_callbacks.py",
    "integrations/transformers.py": "integrations/test_callbacks.py",
    "logs/__init__.py": "test_architecture.py",
    "logs/log_verdict.py": "logs/test_crash_log.py",
    "notebook/__init__.py": "notebook/test_magics.py",
    "notebook/cells.py": "notebook/test_magics.py notebook/test_inner_cells.py",
    "notebook/statement.py": "notebook/test_last_value.py notebook/test_magics.py",
    "recorder/__init__.py": "test_architecture.py",
    "recorder/_torch.py": "recorder/test_unnoticed.py recorder/test_recorder.py",
    "recorder/backward.py": "recorder/test_nonfinite.py recorder/test_nan_unseen.py",
    "recorder/earlier_calls.py": "recorder/test_seen_before.py diagnosis/hints/test_seen.py",
    "recorder/earlier_values.py": "recorder/test_seen_before.py diagnosis/hints/test_seen.py",
    "recorder/handing_on.py": "notebook/test_earlier_cells.py",
    "recorder/history.py": "recorder/test_recorder.py recorder/test_lineage.py",
    "recorder/marked.py": "recorder/test_lineage.py",
    "recorder/mode.py": "recorder/test_recorder.py recorder/test_hostile_objects.py",
    "recorder/nonfinite_inputs.py": "recorder/test_nonfinite.py",
    "recorder/nonfinite_marks.py": "recorder/test_nan_arrivals.py",
    "recorder/nonfinite_steps.py": "recorder/test_nan_arrivals.py",
    "recorder/nonfinite_values.py": "recorder/test_nonfinite.py recorder/test_nan_unseen.py",
    "recorder/provenance.py": "recorder/test_lineage.py",
    "recorder/replaced.py": "recorder/test_lineage.py recorder/test_dataloader.py",
    "recorder/saved_tensor.py": "recorder/test_lineage.py",
    "recorder/sites.py": "recorder/test_recorder.py",
    "render/__init__.py": "test_architecture.py",
    "render/code.py": "render/test_text.py render/test_html.py render/test_screen.py",
    "render/fold.py": "render/test_html.py",
    "render/inline.py": "render/test_html.py",
    "render/markdown.py": "render/test_text.py render/test_screen.py",
    "render/tables.py": "test_main.py",
    "session/__init__.py": "test_architecture.py",
    "session/demo.py": "test_main.py",
    "session/environment.py": "session/test_options.py session/test_ranks.py",
    "session/exit.py": "session/test_ranks.py session/test_early_report.py",
    "session/succession.py": "notebook/test_earlier_cells.py",
    "simulate/__init__.py": "simulate/test_state.py",
    "simulate/_internals.py": "simulate/test_simulate.py",
    "simulate/activation.py": "simulate/test_state.py notebook/test_status.py",
    "simulate/dispatch.py": "simulate/test_kernels.py simulate/test_simulate.py",
    "simulate/op_schema.py": "simulate/test_kernels.py simulate/test_tensors.py",
    "simulate/special.py": "simulate/test_tensors.py simulate/test_simulate.py",
    "simulate/streams.py": "simulate/test_simulate.py simulate/test_surface.py",
    "source/__init__.py": "test_architecture.py",
}
"""Files below ``cudalens/``, and their tests below ``tests/``."""


def selected(file: str) -> list[str]:
    """Return the test files of a file of the package, of a test file itself.

    Raises:
        KeyError: it has none.
    """
    if file.startswith("tests/"):
        return [file]
    path = Path(file).relative_to("cudalens")
    stem = "main" if path.stem == "__main__" else path.stem.removeprefix("_")
    folder = ROOT / "tests" / path.parent
    own = [*folder.glob(f"test_{stem}.py"), *folder.glob(f"test_{stem}_*.py")]
    found = sorted(str(item.relative_to(ROOT)) for item in own)
    others = OTHERS.get(path.as_posix(), "") if own else OTHERS[path.as_posix()]
    return [*found, *(f"tests/{item}" for item in others.split())]


if __name__ == "__main__":
    try:
        print(*selected(sys.argv[1]))
    except KeyError:
        sys.exit(f"{sys.argv[1]} has no tests: say in tests/quick.py which notice when it breaks")
