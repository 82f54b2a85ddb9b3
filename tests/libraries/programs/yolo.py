"""ultralytics: YOLO on pictures made here: training, validation, prediction."""

import os
from pathlib import Path

# Its progress bars show more or fewer steps, by the clock.
os.environ["YOLO_VERBOSE"] = "false"

import numpy as np
from PIL import Image
from ultralytics import YOLO

LIBRARIES = ("ultralytics",)


def program():
    source = np.random.RandomState(2)
    for part, count in (("train", 6), ("val", 3)):
        for kind in ("images", "labels"):
            Path("set", kind, part).mkdir(parents=True)
        for at in range(count):
            picture = Image.fromarray(source.randint(0, 255, (64, 64, 3), dtype=np.uint8))
            picture.save(f"set/images/{part}/{at}.png")
            boxes = [f"{source.randint(2)} .4 .6 .3 .4" for _ in range(2)]
            Path("set", "labels", part, f"{at}.txt").write_text("\n".join(boxes))
    Path("set.yaml").write_text(
        f"path: {Path('set').absolute()}\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n"
    )
    model = YOLO("yolov8n.yaml", verbose=False)
    scores = model.train(
        data="set.yaml",
        epochs=1,
        imgsz=64,
        batch=3,
        device=0,
        workers=0,
        plots=False,
        amp=False,
        verbose=False,
        project=str(Path("runs").absolute()),  # else in the checkout that holds the libraries
        seed=0,
        deterministic=False,
    )
    found = model.predict("set/images/val/0.png", imgsz=64, device=0, verbose=False)
    values = [float(value) for value in scores.results_dict.values()]
    return model.model.state_dict(), values, found[0].boxes.data
