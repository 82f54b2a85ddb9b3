"""recbole: matrix factorization and a sequence model on made-up clicks."""

import sys
from pathlib import Path

import numpy as np

# recbole 1.2.1 needs names that numpy 2 has taken away.
for _name, _kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
    if not hasattr(np, _name):
        setattr(np, _name, _kind)

from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.utils import get_model, get_trainer, init_seed  # noqa: E402

LIBRARIES = ("recbole",)
SAMPLED = {
    "distribution": "uniform",
    "sample_num": 1,
    "alpha": 1.0,
    "dynamic": False,
    "candidate_num": 0,
}


def program():
    sys.argv = ["program"]
    clicks = Path("data", "shop", "shop.inter")
    clicks.parent.mkdir(parents=True)
    source = np.random.RandomState(1)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(20):
        for item in source.permutation(30)[:10]:
            lines.append(f"{user}\t{item}\t{source.randint(1, 6)}\t{source.randint(500)}")
    clicks.write_text("\n".join(lines) + "\n")
    results = []
    for name in ("BPR", "SASRec"):
        config = Config(
            name,
            "shop",
            config_dict={
                "data_path": "data",
                "epochs": 1,
                "train_batch_size": 32,
                "eval_batch_size": 32,
                "gpu_id": "0",
                "use_gpu": True,
                "embedding_size": 8,
                "hidden_size": 8,
                "inner_size": 16,
                "n_layers": 1,
                "show_progress": False,
                "MAX_ITEM_LIST_LENGTH": 8,
                "load_col": {"inter": ["user_id", "item_id", "rating", "timestamp"]},
                "train_neg_sample_args": SAMPLED if name == "BPR" else None,
            },
        )
        init_seed(3, True)
        train, valid, _ = data_preparation(config, create_dataset(config))
        model = get_model(name)(config, train.dataset).to(config["device"])
        best = get_trainer(config["MODEL_TYPE"], name)(config, model).fit(
            train, valid, saved=False, show_progress=False
        )
        results += [model.state_dict(), str(best), next(model.parameters()).is_cuda]
    return results
