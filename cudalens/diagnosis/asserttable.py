"""The assertion texts of the CUDA kernels of torch up to 2.14, with their meanings.

Names of ops and of the arguments at fault are those of the schemas, without ``aten::``.
"""

from __future__ import annotations

_CLASSES = "a label is neither one of the classes nor ignore_index"
_WRAPPED = "an index is outside -size … size - 1 of the dimension that it selects from"
_INDEX = (
    "index:indices _unsafe_index:indices index_put:indices _index_put_impl:indices "
    "_unsafe_index_put:indices"
)
_PLAIN = "an index is outside 0 … size - 1 of the dimension; negative ones do not wrap here"
_NLL = (
    "nll_loss_forward:target nll_loss_backward:target "
    "nll_loss2d_forward:target nll_loss2d_backward:target"
)
_SCATTER = (
    "gather:index scatter:index scatter_add:index scatter_reduce:index index_select:index "
    "embedding:indices"
)
_PROBABILITY = "a probability is outside 0 … 1, or NaN"
_WEIGHTS = "a weight of the distribution is negative, infinite or NaN"
_NO_WEIGHT = "a row of weights has no positive finite sum"
_UNNAMED = (
    "an internal check failed that prints no reason; index_put with accumulate=True checks its "
    "indices so, multinomial its weights in some releases"
)
_UNNAMED_OPS = (
    "index_put:indices _index_put_impl:indices _unsafe_index_put:indices multinomial:self "
    "_assert_async:self ctc_loss:target_lengths _use_cudnn_ctc_loss:target_lengths"
)
_BAG = "_embedding_bag:indices _embedding_bag_forward_only:indices"
_GROUPED = "_grouped_mm:offs _scaled_grouped_mm:offs _scaled_grouped_mm_v2:offs"
_OFFSET = "an offset of a group lies beyond the tensor"
_ALIGNED = "a group's size in bytes is no multiple of 16"
_SPLITS = "symm_mem::all_to_all_vdev_2d:in_splits"
_SEGMENTS = "a length is negative, or the offsets are not sorted"

TEXTS: tuple[tuple[str, str, str], ...] = (
    ("-sizes[i] <= index && index < sizes[i]", _INDEX, _WRAPPED),
    ("index >= -sizes[i] && index < sizes[i]", _INDEX, _WRAPPED),
    (
        "ind >=0 && ind < ind_dim_size",
        "index:indices _unsafe_index:indices gather:index index_select:index embedding:indices",
        "an index is outside the rows of the table",
    ),
    ("srcIndex < srcSelectDimSize", "index_select:index embedding:indices", _PLAIN),
    ("idx_dim >= 0 && idx_dim < index_size", _SCATTER, _PLAIN),
    ("indexValue >= 0 && indexValue < src.sizes[dim]", "gather:index", _PLAIN),
    (
        "indexValue >= 0 && indexValue < tensor.sizes[dim]",
        "scatter:index scatter_add:index",
        _PLAIN,
    ),
    ("ind >= 0 && ind < self_dim_size", "scatter_add:index scatter_reduce:index", _PLAIN),
    (
        "dstIndex < dstAddDimSize",
        "index_add:index index_reduce:index add:other",
        "an index is outside 0 … size - 1 of the dimension that is added to",
    ),
    (
        "dstIndex < static_cast<IndexType>(dstAddDimSize)",
        "index_add:index index_reduce:index",
        "an index is outside 0 … size - 1 of the dimension that is added to",
    ),
    ("dstIndex < dstFillDimSize", "index_fill:index", _PLAIN),
    ("dstIndex < dstCopyDimSize", "index_copy:index", _PLAIN),
    (
        "idx >= -self_dim_size && idx < self_dim_size",
        "index_fill:index index_reduce:index",
        _WRAPPED,
    ),
    ("idx >= 0 && idx < self_dim_size", "index_copy:index", _PLAIN),
    ("idx >= -size && idx < size", "index_select:index", _WRAPPED),
    (
        "idx < numel && idx >= -numel",
        "take:index put:index",
        "an index is outside -numel … numel - 1 of the flattened tensor",
    ),
    (
        "totalElements <= srcSize",
        "masked_scatter:mask",
        "the mask selects more elements than source has",
    ),
    (
        "index >= -num_weights && index < num_weights",
        "embedding_renorm:indices",
        "an index is outside the rows of the table",
    ),
    ("!has_invalid_index", _BAG, "an index is outside the rows of the table"),
    (
        "end >= begin",
        "_embedding_bag:offsets _embedding_bag_forward_only:offsets",
        "the offsets fall, or the last lies beyond the indices",
    ),
    ("t >= 0 && t < n_classes", _NLL, _CLASSES),
    ("t < n_classes", "nll_loss_forward:target nll_loss_backward:target", _CLASSES),
    ("cur_target >= 0 && cur_target < n_classes", _NLL, _CLASSES),
    ("cur_target < n_classes", "nll_loss_forward:target nll_loss_backward:target", _CLASSES),
    ("input_val >= zero && input_val <= one", "binary_cross_entropy:self", _PROBABILITY),
    ("input >= 0. && input <= 1.", "binary_cross_entropy:self", _PROBABILITY),
    ("*input >= 0. && *input <= 1.", "binary_cross_entropy:self", _PROBABILITY),
    (
        "target_val >= zero && target_val <= one",
        "binary_cross_entropy:target",
        "a target is outside 0 … 1, or NaN",
    ),
    (
        "target_k >= 0 && target_k < dim",
        "multi_margin_loss:target",
        "a label is not one of the classes",
    ),
    ("!(val < zero)", "multinomial:self", _WEIGHTS),
    ("val >= zero", "multinomial:self", _WEIGHTS),
    ("THCNumerics<T>::ge(val, zero)", "multinomial:self", _WEIGHTS),
    (
        "probability tensor contains either `inf`, `nan` or element < 0",
        "multinomial:self",
        _WEIGHTS,
    ),
    ("cumdist[size - 1] > static_cast<scalar_t>(0)", "multinomial:self", _NO_WEIGHT),
    (
        "invalid multinomial distribution (sum of probabilities <= 0)",
        "multinomial:self",
        _NO_WEIGHT,
    ),
    *(
        (f"0 <= p{n} && p{n} <= 1", "bernoulli:self bernoulli:p", _PROBABILITY)
        for n in (1, 2, 3, 4)
    ),
    ("lambda >= 0", "poisson:self", "a rate is negative or NaN"),
    (
        "result_size == cumsum_ptr[size - 1]",
        "repeat_interleave:repeats",
        "the repeats do not add up to output_size",
    ),
    ("repeat >= 0", "repeat_interleave:repeats", "a number of repeats is negative"),
    (
        "repeat >= 0 && start >= 0 && end <= result_size",
        "repeat_interleave:repeats",
        "a number of repeats is negative, or they reach beyond output_size",
    ),
    (
        "maxind >= 0 && maxind < outputImageSize",
        "max_unpool2d:indices",
        "an index is outside the output plane",
    ),
    (
        "index >= 0 && index < outputImageSize",
        "max_unpool3d:indices",
        "an index is outside the output volume",
    ),
    *(
        (
            f"FractionalMaxPool{n}d.cu:{text}",
            f"fractional_max_pool{n}d_backward:indices",
            "an index is outside the pooled input",
        )
        for n, text in (
            (2, "index >= 0"),
            (2, "inputH < gradInput.size(2)"),
            (3, "index >= 0"),
            (3, "inputT < gradInput.size(2)"),
        )
    ),
    ("lengths_data[lengths_idx] >= 0", "segment_reduce:lengths", _SEGMENTS),
    ("lengths_data[index] >= 0", "segment_reduce:lengths", _SEGMENTS),
    (
        "ValidateCompressedIndicesCommon.h:cond && message",
        "_validate_compressed_sparse_indices:compressed_idx "
        "_validate_sparse_compressed_tensor_args:compressed_indices "
        "_validate_sparse_csr_tensor_args:crow_indices "
        "sparse_compressed_tensor:compressed_indices",
        "the indices of a compressed sparse tensor break one of its invariants",
    ),
    ("delta >=0", _GROUPED, "the offsets of the groups fall"),
    ("offset <= tensor_ShapeA[0]", _GROUPED, _OFFSET),
    ("offset <= tensor_ShapeB[1]", _GROUPED, _OFFSET),
    ("offset <= tensor_ShapeA[1] && offset <= tensor_ShapeB[0]", _GROUPED, _OFFSET),
    ("delta % align == 0", _GROUPED, _ALIGNED),
    *(
        (f"grouped_common.cuh:{text}", _GROUPED, meaning)
        for text, meaning in (
            ("offsets != nullptr", "the offsets of the groups are missing"),
            ("K_group_size % scale_factor_block_size == 0", "a group is no multiple of the block"),
            ("curr_group_end_offset <= K", _OFFSET),
            ("xq_offset + K_group_size <= (M * K)", _OFFSET),
            (
                "x_scale_offset + M_rounded * scale_cols_padded_curr_group <= x_scale_size",
                "the scales are too few for the groups",
            ),
            ("curr_group_end_offset <= M", _OFFSET),
        )
    ),
    (
        "Some indices in the ragged dimension are out of bounds!",
        "_assert_async:self index_put:indices",
        "an index lies beyond the end of its row in the ragged dimension",
    ),
    ("TensorCompare.cu:", _UNNAMED_OPS, _UNNAMED),
    ("input[0] != 0", _UNNAMED_OPS, _UNNAMED),
    ("NanCheck.cu:*", "", "a tensor that NCCL was to send holds NaN"),
    ("sum_of_splits <= input_dim0", _SPLITS, "the splits add up to more rows than there are"),
    ("split_val >= 0", _SPLITS, "a split is negative"),
)
"""Expression, ops with the argument at fault, sentence.

A file's name stands before a colon where two files share an expression; ``*`` is any expression.
"""
