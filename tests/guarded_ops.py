"""The ops of torch's own test database that a guard looks at."""

from __future__ import annotations

_NAMES = """
__getitem__ _unsafe_masked_index bernoulli cummax gather index_add index_copy index_fill index_put
index_reduce index_select kthvalue masked_scatter multinomial nn.functional.binary_cross_entropy
nn.functional.cross_entropy nn.functional.ctc_loss nn.functional.embedding
nn.functional.embedding_bag nn.functional.max_unpool2d nn.functional.max_unpool3d
nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.nll_loss put
scatter scatter_add scatter_reduce take take_along_dim
"""
GUARDED = tuple(_NAMES.split())
"""Names in the database whose samples reach a guard, forward or backward."""
