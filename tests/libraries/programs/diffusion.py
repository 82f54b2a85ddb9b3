"""diffusers: noise prediction, pipelines and schedulers, a conditioned UNet, an autoencoder."""

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    EulerDiscreteScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)

LIBRARIES = ("diffusers",)


def program():
    unet = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    ).cuda()
    noising = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    for _ in range(2):
        clean = torch.randn(2, 3, 8, 8, device="cuda")
        noise, when = torch.randn_like(clean), torch.randint(0, 50, (2,), device="cuda")
        guess = unet(noising.add_noise(clean, noise, when), when).sample
        loss = torch.nn.functional.mse_loss(guess, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pipeline = DDPMPipeline(unet.eval(), noising)
    pipeline.set_progress_bar_config(disable=True)
    made = [pipeline(num_inference_steps=3, output_type="np").images]
    faster = DDIMScheduler(num_train_timesteps=50)
    faster.set_timesteps(3)
    told = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        cross_attention_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
    ).cuda()
    euler = EulerDiscreteScheduler(num_train_timesteps=50)
    euler.set_timesteps(3, device="cuda")
    text = torch.randn(1, 4, 8, device="cuda")
    image = torch.randn(1, 3, 8, 8, device="cuda")
    latent = torch.randn(1, 4, 8, 8, device="cuda") * euler.init_noise_sigma
    with torch.no_grad():
        for when in faster.timesteps:
            image = faster.step(unet(image, when).sample, when, image).prev_sample
        for when in euler.timesteps:
            guess = told(euler.scale_model_input(latent, when), when, text).sample
            latent = euler.step(guess, when, latent).prev_sample
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    ).cuda()
    return unet.state_dict(), loss, made, image, latent, vae(torch.rand_like(image)).sample
