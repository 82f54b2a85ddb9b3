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
    "__init__.py": "test_contract.py notebook/test_magics.py",
    "core/__init__.py": "test_architecture.py",
    "core/_compiler.py": "guards/test_compiled.py",
    "core/_torch.py": "session/test_sync_debug.py guards/test_captured.py",
    "core/call.py": "diagnosis/host_errors/test_host_errors.py",
    "core/evidence_types.py": "diagnosis/test_observations.py evidence/test_marks.py",
    "core/graph_types.py": "evidence/test_autograd_graph.py diagnosis/test_observations.py",
    "core/report.py": "render/test_plot.py",
    "core/report_types.py": (
        "core/test_report_schema.py core/test_tensor_values.py diagnosis/test_observations.py"
    ),
    "core/source_places.py": "source/test_locate.py core/test_report.py",
    "core/tensor_values.py": "diagnosis/hints/test_nan_origin.py",
    "core/version.py": "test_main.py",
    "diagnosis/__init__.py": "test_architecture.py",
    "diagnosis/assert_meanings.py": (
        "core/test_device_asserts.py diagnosis/test_assert_verdict.py logs/test_fitting_call.py"
    ),
    "diagnosis/candidates.py": "diagnosis/host_errors/test_host_fixes.py",
    "diagnosis/diagnose.py": (
        "evidence/test_finding.py diagnosis/hints/test_nan_origin.py "
        "diagnosis/test_misread_sizes.py"
    ),
    "diagnosis/hints/__init__.py": (
        "diagnosis/hints/test_labels.py diagnosis/hints/test_nan_origin.py "
        "diagnosis/hints/test_hints.py diagnosis/hints/test_neighbours.py "
        "diagnosis/hints/test_live.py diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/_base.py": (
        "diagnosis/hints/test_hints.py diagnosis/hints/test_neighbours.py "
        "diagnosis/hints/test_live.py diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/_makers.py": (
        "diagnosis/hints/test_labels.py diagnosis/hints/test_hints.py "
        "diagnosis/hints/test_neighbours.py diagnosis/hints/test_live.py "
        "diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/_reading.py": (
        "diagnosis/hints/test_hints.py diagnosis/hints/test_tables.py "
        "diagnosis/hints/test_neighbours.py diagnosis/hints/test_live.py "
        "diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/_roles.py": (
        "diagnosis/hints/test_labels.py diagnosis/hints/test_hints.py "
        "diagnosis/hints/test_neighbours.py diagnosis/hints/test_live.py "
        "diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/indexes.py": (
        "diagnosis/hints/test_hints.py diagnosis/hints/test_neighbours.py "
        "diagnosis/hints/test_live.py diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/labels.py": (
        "diagnosis/hints/test_hints.py diagnosis/hints/test_neighbours.py "
        "diagnosis/hints/test_live.py diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/nonfinite.py": (
        "diagnosis/hints/test_nan_origin.py diagnosis/hints/test_hints.py "
        "diagnosis/hints/test_neighbours.py diagnosis/hints/test_live.py "
        "diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/places.py": (
        "diagnosis/hints/test_hints.py diagnosis/hints/test_neighbours.py "
        "diagnosis/hints/test_live.py diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/probabilities.py": (
        "diagnosis/hints/test_nan_origin.py diagnosis/hints/test_hints.py "
        "diagnosis/hints/test_neighbours.py diagnosis/hints/test_live.py "
        "diagnosis/hints/test_seen.py"
    ),
    "diagnosis/hints/tables.py": (
        "diagnosis/hints/test_hints.py diagnosis/hints/test_neighbours.py "
        "diagnosis/hints/test_live.py diagnosis/hints/test_seen.py"
    ),
    "diagnosis/host_errors/__init__.py": "diagnosis/host_errors/test_host_errors.py",
    "diagnosis/host_errors/_base.py": (
        "diagnosis/host_errors/test_host_errors.py diagnosis/host_errors/test_cuda_errors.py"
    ),
    "diagnosis/host_errors/_words.py": "diagnosis/host_errors/test_host_errors.py",
    "diagnosis/host_errors/advice.py": (
        "diagnosis/host_errors/test_host_errors.py diagnosis/host_errors/test_values.py"
    ),
    "diagnosis/host_errors/arguments.py": "diagnosis/host_errors/test_host_fixes.py",
    "diagnosis/host_errors/autograd_errors.py": "diagnosis/host_errors/test_host_errors.py",
    "diagnosis/host_errors/cuda_errors.py": "evidence/test_memory.py",
    "diagnosis/host_errors/saved_tensors.py": "diagnosis/hints/test_neighbours.py",
    "diagnosis/host_errors/sentences.py": "diagnosis/host_errors/test_host_errors.py",
    "diagnosis/moves.py": "diagnosis/host_errors/test_host_fixes.py",
    "diagnosis/nonfinite_edits.py": "recorder/test_nan_arrivals.py",
    "diagnosis/observations.py": (
        "evidence/test_bound.py evidence/test_dataset_column.py diagnosis/test_misread_sizes.py"
    ),
    "diagnosis/observed_errors.py": "diagnosis/test_misread_errors.py",
    "diagnosis/observed_origins.py": (
        "evidence/test_finding.py recorder/test_nonfinite.py diagnosis/test_misread_values.py "
        "diagnosis/test_misread_sizes.py"
    ),
    "diagnosis/origins.py": "diagnosis/host_errors/test_host_errors.py evidence/test_bound.py",
    "diagnosis/user_code.py": "diagnosis/host_errors/test_host_fixes.py",
    "evidence/__init__.py": "test_architecture.py",
    "evidence/attempt.py": "diagnosis/host_errors/test_host_fixes.py",
    "evidence/autograd_graph.py": (
        "evidence/test_module_names.py diagnosis/hints/test_nan_origin.py"
    ),
    "evidence/bound.py": "evidence/test_finding.py diagnosis/test_misread_sizes.py",
    "evidence/call_stack.py": "diagnosis/host_errors/test_host_errors.py",
    "evidence/changes.py": "evidence/test_python_values.py diagnosis/test_misread_values.py",
    "evidence/collect.py": "evidence/test_finding.py",
    "evidence/context.py": "diagnosis/host_errors/test_host_errors.py",
    "evidence/dataset_column.py": "evidence/test_finding.py",
    "evidence/error_causes.py": "evidence/test_modified_tensor.py evidence/test_recorded_way.py",
    "evidence/exception.py": (
        "evidence/test_user_objects.py evidence/test_lost_context.py "
        "diagnosis/test_misread_errors.py"
    ),
    "evidence/failing_call.py": "diagnosis/host_errors/test_host_fixes.py",
    "evidence/failure.py": "evidence/test_collect.py evidence/test_finding.py",
    "evidence/finding.py": "recorder/test_nan_unseen.py diagnosis/test_misread_values.py",
    "evidence/finite_trial.py": "recorder/test_nan_unseen.py",
    "evidence/freed_graph.py": "evidence/test_modified_tensor.py",
    "evidence/host_value.py": (
        "evidence/test_counted_labels.py diagnosis/host_errors/test_values.py "
        "diagnosis/test_misread_values.py"
    ),
    "evidence/marks.py": "recorder/test_nonfinite.py",
    "evidence/module_names.py": "evidence/test_bound.py",
    "evidence/nonfinite.py": "recorder/test_nan_unseen.py recorder/test_nan_arrivals.py",
    "evidence/program.py": "evidence/test_bound.py",
    "evidence/python_values.py": (
        "evidence/test_dataset_column.py notebook/test_inner_cells.py "
        "diagnosis/test_misread_values.py"
    ),
    "evidence/tensors.py": (
        "evidence/test_finding.py diagnosis/test_misread_values.py diagnosis/test_misread_sizes.py"
    ),
    "evidence/torch_errors.py": "evidence/test_user_objects.py",
    "evidence/trial.py": "diagnosis/host_errors/test_host_errors.py",
    "evidence/value_facts.py": (
        "evidence/test_finding.py diagnosis/hints/test_nan_origin.py "
        "diagnosis/test_misread_values.py"
    ),
    "evidence/variables.py": "diagnosis/host_errors/test_host_errors.py",
    "guards/__init__.py": "guards/test_register.py",
    "guards/_base.py": "guards/test_register.py guards/test_ranges.py guards/test_catalogue.py",
    "guards/catalogue/__init__.py": "guards/test_register.py",
    "guards/catalogue/_dims.py": (
        "guards/catalogue/test_indexing.py guards/test_catalogue.py guards/test_device_text.py"
    ),
    "guards/catalogue/along_dim.py": (
        "guards/catalogue/test_indexing.py guards/test_catalogue.py guards/test_device_text.py "
        "guards/test_ranges.py"
    ),
    "guards/catalogue/assertions.py": (
        "guards/test_other.py guards/test_catalogue.py guards/test_ranges.py"
    ),
    "guards/catalogue/embedding.py": (
        "guards/catalogue/test_indexing.py guards/test_catalogue.py guards/test_ranges.py "
        "guards/test_device_text.py"
    ),
    "guards/catalogue/indexing.py": (
        "guards/test_ranges.py guards/test_device_text.py guards/test_catalogue.py"
    ),
    "guards/catalogue/losses.py": (
        "guards/test_ranges.py guards/test_device_text.py guards/test_catalogue.py"
    ),
    "guards/catalogue/matrices.py": "guards/test_catalogue.py",
    "guards/catalogue/pooling.py": "guards/test_catalogue.py guards/test_device_text.py",
    "guards/catalogue/sampling.py": (
        "guards/test_ranges.py guards/test_device_text.py guards/test_catalogue.py"
    ),
    "guards/catalogue/segments.py": (
        "guards/test_other.py guards/test_catalogue.py guards/test_device_text.py "
        "guards/test_ranges.py"
    ),
    "guards/catalogue/sparse.py": (
        "guards/test_catalogue.py guards/test_ranges.py guards/test_device_text.py"
    ),
    "guards/deferred.py": "guards/test_captured.py guards/test_interceptor.py",
    "guards/engine.py": "guards/test_ranges.py guards/test_device_text.py",
    "guards/host_waits.py": "session/test_sync_debug.py guards/test_deferred.py",
    "guards/interceptor.py": "guards/test_ranges.py",
    "guards/max_norm.py": "evidence/test_max_norm.py",
    "guards/past_calls.py": "guards/test_deferred.py",
    "guards/pending.py": "guards/test_deferred.py guards/test_captured.py test_docstrings.py",
    "guards/plans.py": "guards/test_ranges.py guards/test_register.py guards/test_interceptor.py",
    "guards/process.py": "guards/test_register.py session/test_threads.py",
    "guards/refused_calls.py": "guards/test_interceptor.py",
    "integrations/__init__.py": "test_architecture.py",
    "integrations/lightning.py": "integrations/test_callbacks.py",
    "integrations/transformers.py": "integrations/test_callbacks.py",
    "logs/__init__.py": "test_architecture.py",
    "logs/log_verdict.py": "logs/test_crash_log.py",
    "notebook/__init__.py": "notebook/test_magics.py",
    "notebook/cells.py": (
        "notebook/test_inner_cells.py notebook/test_deferred_cells.py notebook/test_opening.py"
    ),
    "notebook/statement.py": "notebook/test_last_value.py",
    "recorder/__init__.py": "test_architecture.py",
    "recorder/_torch.py": (
        "recorder/test_unnoticed.py recorder/test_recorder.py recorder/test_nan_arrivals.py"
    ),
    "recorder/backward.py": (
        "recorder/test_nan_unseen.py evidence/test_module_names.py recorder/test_nan_arrivals.py"
    ),
    "recorder/calls.py": "recorder/test_recorder.py recorder/test_lineage.py",
    "recorder/dataloader.py": "evidence/test_dataset_column.py",
    "recorder/earlier_calls.py": "recorder/test_seen_before.py diagnosis/hints/test_seen.py",
    "recorder/earlier_values.py": "recorder/test_seen_before.py diagnosis/hints/test_seen.py",
    "recorder/handing_on.py": "notebook/test_earlier_cells.py",
    "recorder/history.py": (
        "recorder/test_recorder.py recorder/test_lineage.py recorder/test_dataloader.py"
    ),
    "recorder/marked.py": "recorder/test_lineage.py recorder/test_dataloader.py",
    "recorder/mode.py": (
        "recorder/test_recorder.py recorder/test_hostile_objects.py recorder/test_nan_unseen.py"
    ),
    "recorder/nonfinite.py": "recorder/test_nan_watch.py recorder/test_nan_arrivals.py",
    "recorder/nonfinite_inputs.py": "recorder/test_nonfinite.py recorder/test_nan_unseen.py",
    "recorder/nonfinite_marks.py": (
        "recorder/test_nan_watch.py recorder/test_nan_arrivals.py recorder/test_nonfinite.py"
    ),
    "recorder/nonfinite_passes.py": (
        "recorder/test_gradient_leaves.py recorder/test_nan_watch.py recorder/test_nan_unseen.py "
        "diagnosis/test_nonfinite_edits.py"
    ),
    "recorder/nonfinite_steps.py": "recorder/test_nan_watch.py recorder/test_nan_arrivals.py",
    "recorder/nonfinite_values.py": "recorder/test_nonfinite.py recorder/test_nan_arrivals.py",
    "recorder/places.py": "recorder/test_lineage.py",
    "recorder/provenance.py": (
        "recorder/test_lineage.py recorder/test_dataloader.py evidence/test_dataset_column.py "
        "diagnosis/hints/test_nan_origin.py"
    ),
    "recorder/recorder.py": (
        "recorder/test_handing_on.py recorder/test_history.py recorder/test_lineage.py"
    ),
    "recorder/replaced.py": (
        "recorder/test_lineage.py recorder/test_dataloader.py recorder/test_nan_arrivals.py"
    ),
    "recorder/saved_tensor.py": "recorder/test_lineage.py evidence/test_modified_tensor.py",
    "recorder/sites.py": "recorder/test_recorder.py evidence/test_call_stack.py",
    "render/__init__.py": "test_architecture.py",
    "render/code.py": "render/test_text.py render/test_screen.py",
    "render/figures.py": "render/test_html.py",
    "render/fold.py": "render/test_html.py render/test_strip.py",
    "render/html.py": "render/test_text.py render/test_screen.py",
    "render/inline.py": "render/test_html.py render/test_text.py",
    "render/markdown.py": "render/test_screen.py",
    "render/screen.py": "render/test_text.py render/test_html.py",
    "render/strip.py": "render/test_html.py",
    "render/text.py": "render/test_screen.py",
    "render/words.py": "render/test_text.py render/test_html.py render/test_screen.py",
    "session/__init__.py": "test_architecture.py",
    "session/environment.py": "session/test_options.py session/test_ranks.py",
    "session/exit.py": "session/test_ranks.py session/test_early_report.py",
    "session/findings.py": "session/test_early_report.py",
    "session/options.py": "notebook/test_status.py",
    "session/process.py": "notebook/test_status.py test_docstrings.py",
    "simulate/__init__.py": "simulate/test_activation.py",
    "simulate/activation.py": "simulate/test_dispatch.py",
    "simulate/dispatch.py": (
        "simulate/test_kernels.py simulate/test_layouts.py simulate/test_tensors.py "
        "simulate/test_memory.py"
    ),
    "simulate/kernels.py": "simulate/test_tensors.py simulate/test_layouts.py",
    "simulate/op_schema.py": "simulate/test_kernels.py simulate/test_tensors.py",
    "simulate/relabel.py": "simulate/test_memory.py",
    "simulate/special.py": "simulate/test_layouts.py simulate/test_memory.py",
    "simulate/streams.py": "simulate/test_surface.py",
    "source/__init__.py": "test_architecture.py",
    "source/argument_names.py": "evidence/test_call_stack.py",
    "source/bindings.py": "source/test_readers.py",
    "source/files.py": "source/test_edited.py source/test_locate.py",
    "source/locate.py": "source/test_shown_frames.py",
    "source/running_call.py": "evidence/test_call_stack.py",
    "source/running_node.py": "source/test_argument_names.py evidence/test_user_objects.py",
    "source/safe_eval.py": "source/test_argument_names.py",
    "source/scopes.py": "source/test_bindings.py evidence/test_python_values.py",
    "source/stack.py": "recorder/test_eager.py",
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
