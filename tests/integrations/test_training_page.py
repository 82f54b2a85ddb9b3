"""The examples of docs/training.md, run as they stand on the rehearsal device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, python

PAGE = (ROOT / "docs" / "training.md").read_text("utf-8")
_, LOOP, STUDY = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.thorough
def test_a_plain_loop_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    done = python("train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    said = PAGE.partition("```text\n")[2].partition("\n```")[0]
    assert said in done.stderr


@pytest.mark.thorough
def test_a_bad_trial_is_pruned_and_the_next_one_runs(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    end = "\nfor one in study.trials:\n    print(one.state.name, one.params, one.user_attrs)"
    done = python("-c", STUDY + end, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines()[1:])
    assert lines[0] == "COMPLETE {'rows': 6} {}"
    assert lines[1].startswith("PRUNED {'rows': 2} {'cudalens': ")
    assert "= 3 is outside" in lines[1]
