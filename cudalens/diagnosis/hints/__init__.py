"""Readings of a finding: the cause that its facts prove, in the order in which they are asked."""

from __future__ import annotations

from cudalens.core.limits import Limits
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints import indexes, labels, nonfinite, places, probabilities, tables
from cudalens.diagnosis.hints._base import Reading, first_reading
from cudalens.diagnosis.hints._roles import role_of

OF_INTEGERS: tuple[Reading, ...] = (
    # What the numbers were before they were damaged.
    indexes.nan_cast_to_integer,
    # What one kind of number means.
    labels.binary_labels_one_output,
    tables.boxes_off_page,
    tables.mark_as_id,
    labels.mask_of_0_and_255,
    tables.positions_beyond_table,
    tables.segment_ids,
    labels.mark_not_ignored,
    tables.unknown_tokens,
    # How they count.
    labels.relabel,
    labels.one_based_labels,
    indexes.no_class_for_blank,
    indexes.one_based_ids,
    places.too_few_places,
)
"""Readings of labels, ids and indices."""
OF_NUMBERS: tuple[Reading, ...] = (
    probabilities.bad_weights,
    probabilities.image_not_divided,
    probabilities.not_probabilities,
    probabilities.rounded_out_of_interval,
    probabilities.scores_as_probabilities,
    probabilities.labels_as_binary_target,
    probabilities.nan_before,
)
"""Readings of probabilities, weights and parameters of distributions."""
OF_NONFINITE: tuple[Reading, ...] = (
    nonfinite.all_labels_ignored,
    nonfinite.all_masked,
    nonfinite.negative_target,
    nonfinite.of_too_few,
    nonfinite.outside_domain,
    nonfinite.row_with_infinity,
    nonfinite.slope_at_zero,
    nonfinite.overflow,
)
"""Readings of a first NaN or infinity."""
READINGS = (*OF_INTEGERS, *OF_NUMBERS, *OF_NONFINITE)


def find_hints(evidence: Evidence, limits: Limits) -> tuple[Hint, ...]:
    """Return the first reading that the evidence of a finding carries."""
    if evidence.violation is None:
        return ()
    if evidence.violation.is_nonfinite:
        return first_reading(OF_NONFINITE, evidence, limits)
    is_integer = role_of(evidence) is not None
    return first_reading(OF_INTEGERS if is_integer else OF_NUMBERS, evidence, limits)
