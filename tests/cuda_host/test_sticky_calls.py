"""What torch raises after a failed kernel: the table that the rehearsal device is held to."""

from __future__ import annotations

import pytest
import torch

from tests import standin
from tests.releases import release
from tests.sticky_calls import ADVICE, ORDINAL, TEXT, expected, texts_after

DSA = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
"""The last line of each error of CUDA's up to torch 2.11; 2.12 was not tried."""
LAST = DSA if release() <= (2, 11) else ""
SAYS_WHERE = release() > (2, 8)
"""Whether an error says where it is explained, and what an ordinal may mean; 2.9 was not tried."""
SAID = TEXT if SAYS_WHERE else TEXT.splitlines(keepends=True)[0]


def lose() -> None:
    standin.fault("sigmoid")
    torch.sigmoid(torch.ones(3, device="cuda"))


def test_calls_that_need_the_context_raise() -> None:
    said = SAID + ADVICE + LAST
    # The stand-in for cuBLAS is an empty library: CUDA's own error comes before any status of it.
    assert texts_after(lose) == expected(said, matmul=said)


def test_the_advice_to_block_is_missing_where_launches_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(torch.AcceleratorError) as caught:
        lose()
    assert (str(caught.value), caught.value.error_code) == (SAID + LAST, standin.ASSERT)


def test_a_device_that_is_not_there() -> None:
    for call in (lambda: torch.ones(1, device="cuda:9"), lambda: torch.cuda.synchronize(9)):
        with pytest.raises(torch.AcceleratorError) as caught:
            call()
        # torch 2.15 leaves out the last line; torch 2.11 has the advice in its place.
        first = ORDINAL.splitlines(keepends=True)[: 1 + SAYS_WHERE]
        earlier = "".join(first) + ADVICE + DSA
        assert str(caught.value) in (ORDINAL, ORDINAL.rpartition("For more")[0], earlier)
        assert str(caught.value).startswith("".join(first))
