"""torchmetrics: classification, regression, retrieval, text and image metrics over batches."""

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MultilabelF1Score,
)
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score, SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP, RetrievalNormalizedDCG
from torchmetrics.text import Perplexity

LIBRARIES = ("torchmetrics",)


def program():
    kinds = (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassConfusionMatrix,
        MulticlassAUROC,
        MulticlassJaccardIndex,
    )
    many = MetricCollection([kind(4) for kind in kinds]).cuda()
    two = MetricCollection([BinaryAUROC(), BinaryCalibrationError()]).cuda()
    tags = MultilabelF1Score(3).cuda()
    real = MetricCollection(
        [MeanSquaredError(), PearsonCorrCoef(), R2Score(), SpearmanCorrCoef()]
    ).cuda()
    ranks = MetricCollection([RetrievalMAP(), RetrievalNormalizedDCG()]).cuda()
    text, image = Perplexity(ignore_index=-100).cuda(), StructuralSimilarityIndexMeasure().cuda()
    for _ in range(3):
        many.update(
            torch.rand(16, 4, device="cuda").softmax(-1), torch.randint(0, 4, (16,), device="cuda")
        )
        answers = torch.randint(0, 2, (12,), device="cuda")
        two.update(torch.rand(12, device="cuda"), answers)
        ranks.update(torch.rand(12, device="cuda"), answers, indexes=torch.arange(12).cuda() // 3)
        tags.update(torch.rand(5, 3, device="cuda"), torch.randint(0, 2, (5, 3), device="cuda"))
        real.update(torch.randn(9, device="cuda"), torch.randn(9, device="cuda"))
        labels = torch.randint(0, 7, (2, 5), device="cuda")
        labels[0, 3:] = -100
        text.update(torch.randn(2, 5, 7, device="cuda"), labels)
        image.update(
            torch.rand(1, 3, 16, 16, device="cuda"), torch.rand(1, 3, 16, 16, device="cuda")
        )
    return [item.compute() for item in (many, two, tags, real, ranks, text, image)]
