"""The functions of torch by name, and their traits.

One table answers all questions about a name: does its result share the memory of an argument, does
it cast, does it only pass values on?  The recorder looks up each call, the diagnosis each recorded
step, the reader each call on a line.  ``tests/core/test_torch_functions.py`` calls each function
and checks its traits, so a row here is a fact about torch.

A name is spelled as the function's ``__name__``: ``add_`` and ``__setitem__``.  A report uses the
last part of the public name without the underscores of operators, ``setitem``: see :func:`stems`.

Not here: the ops that the rehearsal device has kernels for, and the schemas that guards act on.
"""

from __future__ import annotations

from enum import Flag, auto
from functools import cache


class Trait(Flag):
    """A property of a function that holds for all arguments, unless its text says otherwise."""

    # --- where the elements of the result come from ----------------------------------------------
    KEEPS = auto()
    """Each element is one of an argument, or a number that was passed; a cast may round it."""
    WHOLE = auto()
    """Each element of the first argument is in the result."""
    IN_ORDER = auto()
    """The elements of the first argument, each once, in row-major order."""
    VIEW = auto()
    """The result may share the memory of the first argument, or be that argument."""
    NEVER_COPIES = auto()
    """The result always shares that memory: no kernel runs."""
    CHOOSES = auto()
    """The other tensors select elements of the first."""
    JOINS = auto()
    """The elements of several tensors, one tensor after the other."""
    SUBSTITUTES = auto()
    """A tensor with the elements of other tensors, or numbers, at some positions."""
    BLANKS = auto()
    """A tensor with 0 or another number at some positions."""
    CONSTANT = auto()
    """Takes a number that is written to many elements."""
    FROM_PYTHON = auto()
    """Makes a tensor of Python or NumPy numbers."""

    # --- dtype and device ------------------------------------------------------------------------
    CAST = auto()
    """The dtype may change, and changing it is a purpose of the function."""
    TO_INTEGER = auto()
    """The new dtype is an integer type or bool."""
    TO_HALF = auto()
    """The new dtype has 16 bits: finite numbers may become infinite."""
    MOVES = auto()
    """The device may change."""

    # --- values of its own -----------------------------------------------------------------------
    FACTORY = auto()
    """Makes a tensor without a tensor argument, on the CPU unless ``device=`` says otherwise."""
    TAKES_SIZES = auto()
    """Takes the sizes of the result one by one, or as a list."""
    NUMBERS = auto()
    """The result has positions, intervals or counts."""
    SORTS = auto()
    """The result has elements of the argument, or their positions, or both."""
    COMPARES = auto()
    """The result is boolean."""
    ROUNDS = auto()
    """The result has whole numbers."""

    # --- writes ----------------------------------------------------------------------------------
    OVERWRITES = auto()
    """Writes to all elements, whatever they were."""
    FILLS = auto()
    """``OVERWRITES`` without another tensor."""
    WRITES = auto()
    """Writes to some elements; see :func:`value_at`."""
    ALONG_DIM = auto()
    """``WRITES`` with a dimension before the index."""
    ADDS = auto()
    """``WRITES`` that combines the new values with the old ones."""
    ONLY_IN_PLACE = auto()
    """No function without the last underscore does the same."""
    RENEWS = auto()
    """The tensor may have other memory afterwards."""
    RESERVES = auto()
    """Reserves memory, and writes no value."""

    # --- facts and values for the host -----------------------------------------------------------
    ASKS = auto()
    """Returns or sets a fact, and neither reads nor makes a value: the call is not recorded."""
    FACT = auto()
    """Returns a fact of a tensor, such as its shape, and changes nothing."""
    READS = auto()
    """Copies values to the host."""
    NUMBER = auto()
    """One value, as a Python number."""
    SHARES = auto()
    """Afterwards code outside torch can write to the result's memory, if that is on the host."""
    GIVES = auto()
    """Afterwards code outside torch can write to the memory of the first argument.

    ``copy.copy`` and ``torch.save`` call ``untyped_storage``, and a launch by Triton ``data_ptr``.
    """
    CUTS = auto()
    """The result has no autograd graph, and an argument may have one."""

    # --- arithmetic ------------------------------------------------------------------------------
    BROADCASTS = auto()
    """Combines its tensors element by element, and repeats those of size 1."""
    PRODUCT = auto()
    """A matrix product."""
    FACTORS = auto()
    """Its first two arguments are the two factors, in this order."""
    LAYER = auto()
    """A function that a layer without an activation runs."""
    SIZED_BY_WEIGHT = auto()
    """The second argument is a weight, whose size is that of a dimension of the result."""
    ACTIVATION = auto()
    """The result goes beyond 0 … 1."""
    FINITE = auto()
    """Finite inputs become infinite by overflow alone, apart from a division by 0."""
    SUM = auto()
    """The sum or the difference of two arguments, element by element."""
    DIVIDES = auto()
    """The first argument is divided by the second."""
    SPREAD = auto()
    """Deviation or variance."""
    EXPONENTIAL = auto()
    LOGARITHM = auto()
    """Of numbers above 0; at 0 it is infinite, and so is its slope."""
    ARC = auto()
    """Of numbers from -1 to 1; at both the slope is infinite."""
    CLAMPS = auto()
    """Takes a bound, which replaces each element below it in the result."""

    # --- how it is called ------------------------------------------------------------------------
    TENSOR = auto()
    """The result is one tensor, whatever the arguments are."""
    PROPERTY = auto()
    """It is read as ``x.T``, without a call."""
    OPERATOR = auto()
    """An operator's method that writes to no tensor."""
    FORGETS_KEYWORDS = auto()
    """It does not pass its keyword arguments to the modes: a bug of torch."""


_NONE = Trait(0)
_IMPLIED = {
    Trait.IN_ORDER: Trait.WHOLE,
    Trait.WHOLE: Trait.KEEPS,
    Trait.NEVER_COPIES: Trait.VIEW,
    Trait.CHOOSES: Trait.KEEPS,
    Trait.JOINS: Trait.KEEPS,
    Trait.SUBSTITUTES: Trait.KEEPS,
    Trait.FROM_PYTHON: Trait.KEEPS,
    Trait.TO_INTEGER: Trait.CAST,
    Trait.TO_HALF: Trait.CAST,
    Trait.CAST: Trait.KEEPS,
    Trait.MOVES: Trait.KEEPS,
    Trait.FILLS: Trait.OVERWRITES,
    Trait.ADDS: Trait.WRITES,
    Trait.ALONG_DIM: Trait.WRITES,
    Trait.FACT: Trait.ASKS,
    Trait.NUMBER: Trait.READS,
    Trait.FACTORS: Trait.PRODUCT,
}
"""A trait on the left implies the one on the right.

The order matters: an implied trait stands below the one that implies it.
"""
_ROWS = {
    # Views of all elements.
    "squeeze unsqueeze unflatten view_as": "in_order never_copies tensor",
    "alias": "in_order never_copies",
    "detach": "in_order never_copies tensor cuts",
    "ravel flatten reshape_as contiguous": "in_order view tensor",
    "view": "in_order never_copies tensor takes_sizes",
    "reshape": "in_order view tensor takes_sizes",
    "expand": "whole never_copies tensor takes_sizes",
    "expand_as broadcast_to": "whole never_copies tensor",
    "t": "whole never_copies tensor finite",
    "permute transpose swapaxes swapdims movedim moveaxis": "whole never_copies tensor",
    "_unsafe_view _reshape_alias": "in_order view",
    "as_subclass positive resolve_neg": "in_order view",
    "T mT": "whole never_copies property",
    "data": "in_order view property renews cuts",
    "detach_": "in_order view cuts",
    "requires_grad_": "in_order view asks",
    # Views of some elements, of their bits, or of the values that they encode.
    "select narrow diagonal unfold as_strided": "keeps never_copies tensor",
    "chunk split split_with_sizes tensor_split dsplit hsplit vsplit unbind": "keeps view",
    "unsafe_chunk unsafe_split __iter__": "keeps view",
    "H mH real imag": "view property",
    "adjoint conj _conj resolve_conj view_as_complex view_as_real": "view",
    "atleast_1d atleast_2d atleast_3d": "view",
    "values indices crow_indices col_indices": "view",
    # Other dtypes and devices, and copies.
    "float double": "in_order cast view tensor",
    "half bfloat16": "in_order to_half view tensor",
    "int long short byte char bool": "in_order to_integer view tensor",
    "to": "in_order cast moves view tensor",
    "type": "in_order cast moves view",
    "type_as": "in_order cast moves view tensor",
    "cpu cuda": "in_order moves view tensor",
    "copy_": "in_order cast moves overwrites only_in_place",
    "clone pin_memory": "in_order tensor",
    # Chosen, joined and repeated elements.
    "__getitem__": "chooses view operator",
    "index_select gather masked_select take take_along_dim": "chooses tensor",
    "repeat_interleave": "chooses",
    "cat concat concatenate stack hstack vstack": "joins tensor",
    "pad_sequence": "joins constant",
    "flip roll repeat": "whole tensor",
    "where": "substitutes broadcasts constant",
    "masked_fill": "substitutes broadcasts constant tensor",
    "tril triu": "blanks tensor",
    "fill_diagonal_": "blanks",
    "embedding": "keeps sized_by_weight",
    # New tensors.
    "tensor": "from_python tensor cuts",
    "as_tensor asarray from_numpy": "from_python shares cuts",
    "scalar_tensor": "from_python cuts",
    "empty": "factory takes_sizes tensor reserves",
    "ones zeros rand randn": "factory takes_sizes tensor",
    "full": "factory takes_sizes tensor constant",
    "arange linspace randint randperm": "factory tensor",
    "eye logspace tril_indices triu_indices": "factory",
    "new_empty": "takes_sizes reserves",
    "new_ones new_zeros": "takes_sizes",
    "full_like new_full fill index_fill pad": "constant",
    "ones_like zeros_like rand_like randn_like": "tensor",
    "empty_like empty_strided empty_permuted new_empty_strided": "reserves",
    # Positions, counts and booleans.
    "argmax argmin": "numbers tensor",
    "argsort bincount bucketize multinomial nonzero searchsorted": "numbers",
    "cumsum": "numbers finite tensor",
    "floor_divide": "rounds broadcasts",
    "__floordiv__ __rfloordiv__ __ifloordiv__": "rounds broadcasts",
    "floor ceil round": "rounds tensor",
    "trunc": "rounds",
    "sort topk max min unique": "sorts",
    "eq ne lt le gt ge": "compares broadcasts",
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__": "compares broadcasts operator",
    "logical_and logical_or": "compares broadcasts",
    "isin": "compares",
    "one_hot": "tensor",
    # Writes.
    "fill_ zero_ normal_ random_ uniform_": "fills only_in_place",
    "cauchy_ exponential_ geometric_ log_normal_": "fills only_in_place",
    "bernoulli_": "fills",
    "_foreach_zero_ _foreach_copy_": "overwrites",
    "__setitem__ index_put_ put_ masked_scatter_": "writes keeps",
    "masked_fill_": "writes constant",
    "index_copy_ scatter_": "writes keeps along_dim",
    "index_fill_": "writes along_dim constant",
    "index_add_ index_reduce_ scatter_add_ scatter_reduce_": "writes along_dim adds",
    "resize_ resize_as_": "renews reserves",
    "set_": "renews reserves only_in_place",
    "record_stream resize_as resize_as_sparse_": "reserves",
    # Facts and values for the host.
    "device dtype shape ndim": "fact property",
    "size dim ndimension stride numel nelement storage_offset element_size": "fact",
    "is_floating_point is_complex is_contiguous is_signed": "fact",
    "get_device register_hook retain_grad": "asks",
    "is_shared is_inference is_pinned is_set_to is_same_size is_tensor is_storage": "asks",
    "has_names _is_view _nested_tensor_size _has_compatible_shallow_copy_type": "asks",
    "_set_grad_enabled set_grad_enabled is_grad_enabled is_inference_mode_enabled": "asks",
    "result_type can_cast promote_types get_default_dtype": "asks",
    "_set_deterministic_algorithms": "asks",
    "__len__ __hash__ __format__ __dir__ __reduce_ex__": "asks",
    "item": "number",
    "__int__ __float__": "number operator",
    "__complex__ __repr__ tolist": "reads",
    "data_ptr untyped_storage storage share_memory_": "gives",
    "numpy __array__": "reads gives",
    "__dlpack__": "gives forgets_keywords",
    "frombuffer from_dlpack": "shares",
    "chain_matmul dim_order": "forgets_keywords",
    # Arithmetic.
    "add sub": "sum broadcasts finite tensor",
    "mul pow": "broadcasts finite tensor",
    "div": "divides broadcasts finite tensor",
    "div_ divide true_divide": "divides",
    "__truediv__": "divides broadcasts finite operator",
    "__itruediv__": "divides broadcasts finite",
    "__add__ __radd__ __sub__ __rsub__": "sum broadcasts finite operator",
    "__mul__ __rmul__ __pow__": "broadcasts finite operator",
    "__iadd__ __isub__ rsub": "sum broadcasts finite",
    "__imul__ __idiv__ __rdiv__": "broadcasts finite",
    "__rtruediv__ __rpow__ __ipow__ __rand__ __ror__ __rxor__ __iand__ __ior__ __ixor__": (
        "broadcasts"
    ),
    "__mod__ __rmod__ __imod__ maximum minimum": "broadcasts",
    "__and__ __or__ __xor__": "broadcasts operator",
    "__invert__ __neg__ __bool__ __index__": "operator",
    "matmul mv dot": "factors finite tensor",
    "mm bmm": "factors finite tensor layer",
    "__matmul__": "factors finite operator",
    "__rmatmul__ __imatmul__": "product finite",
    "einsum": "product finite",
    "addmm baddbmm addmv": "product finite layer",
    "linear conv1d conv2d conv3d": "layer sized_by_weight finite",
    "convolution": "layer finite",
    "conv_transpose1d conv_transpose2d conv_transpose3d": "layer",
    "relu gelu tanh": "activation tensor",
    "leaky_relu elu silu softplus hardtanh": "activation",
    "clamp_min": "activation clamps",
    "clamp": "clamps tensor",
    "clip clamp_ clip_": "clamps",
    "exp": "exponential finite tensor",
    "expm1 exp2": "exponential finite",
    "log": "logarithm tensor",
    "log2 log10": "logarithm",
    "acos asin": "arc",
    "std var std_mean var_mean": "spread",
    "sum mean": "finite tensor",
    "square sinh cosh prod cumprod reciprocal norm mse_loss addcmul": "finite",
    "scaled_dot_product_attention _add_relu _to_copy": "finite",
    "abs cos log_softmax neg sigmoid sin softmax sqrt": "tensor",
}
"""The traits of each function; a name is in one row."""


def _read(rows: dict[str, str]) -> dict[str, Trait]:
    table: dict[str, Trait] = {}
    for names, words in rows.items():
        traits = _NONE
        for word in words.split():
            traits |= Trait[word.upper()]
        for trait, implied in _IMPLIED.items():
            traits |= implied if trait in traits else _NONE
        for name in names.split():
            if name in table:
                raise ValueError(f"{name} is in two rows")
            table[name] = traits
    return table


TRAITS = _read(_ROWS)
"""The traits of each function by its name."""


@cache
def functions(having: Trait, without: Trait = _NONE) -> frozenset[str]:
    """Return the names of the functions with all traits of ``having`` and none of ``without``.

    Example:
        >>> sorted(functions(Trait.TO_HALF))
        ['bfloat16', 'half']
    """
    # Plain integers: the operators of ``Flag`` are slow.
    wanted, refused = having.value, without.value
    return frozenset(
        name
        for name, traits in TRAITS.items()
        if traits.value & wanted == wanted and not traits.value & refused
    )


CONVERSIONS = functions(Trait.CAST | Trait.VIEW) | functions(Trait.MOVES | Trait.VIEW)
"""Functions that return a tensor in another dtype or on another device."""


def stem(name: str) -> str:
    """Return the name of a function as reports write it: ``setitem`` for ``__setitem__``."""
    return name.strip("_") if name.startswith("__") else name


@cache
def stems(having: Trait, without: Trait = _NONE) -> frozenset[str]:
    """Return the same as :func:`functions`, with the names as reports write them.

    Example:
        >>> sorted(stems(Trait.CHOOSES | Trait.VIEW))
        ['getitem']
    """
    return frozenset(map(stem, functions(having, without)))


def is_in_place(name: str) -> bool:
    """Return whether a name is that of an in-place function: ``add_``, and not ``__add__``."""
    return name.endswith("_") and not name.endswith("__")


def value_at(name: str) -> int:
    """Return the index of the argument that a function writes to some elements, else 0."""
    traits = TRAITS.get(name, _NONE)
    if Trait.WRITES not in traits:
        return 0
    return 3 if Trait.ALONG_DIM in traits else 2
