"""transformers: LayoutLMv3, words with boxes on a page, and its picture."""

import torch
from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

LIBRARIES = ("transformers",)


def program():
    model = LayoutLMv3ForTokenClassification(
        LayoutLMv3Config(
            vocab_size=80,
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=32,
            coordinate_size=8,
            shape_size=8,
            max_position_embeddings=48,
            input_size=24,
            patch_size=8,
            num_labels=5,
        )
    ).cuda()
    words = torch.randint(3, 80, (2, 14), device="cuda")
    corner = torch.randint(0, 500, (2, 14, 2), device="cuda")
    boxes = torch.cat([corner, corner + torch.randint(1, 400, (2, 14, 2), device="cuda")], -1)
    page = torch.rand(2, 3, 24, 24, device="cuda")
    kinds = torch.randint(0, 5, (2, 14), device="cuda")
    kinds[:, -3:] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for _ in range(2):
        optimizer.zero_grad()
        given = model(
            input_ids=words,
            bbox=boxes,
            attention_mask=torch.ones_like(words),
            pixel_values=page,
            labels=kinds,
        )
        given.loss.backward()
        optimizer.step()
    return model.state_dict(), given.logits, given.loss
