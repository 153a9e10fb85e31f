"""Modules for images and volumes."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.modules.case import Case, built, from_config
from benchmarks.modules.data import CLASSES, denoised, images_by_name, masks, noisy_at_times, patterns


def _torchvision(name: str) -> Any:
    return built(f"torchvision.models:{name}", weights=None, num_classes=CLASSES)


def _timm(name: str, **settings: Any) -> Any:
    return built("timm:create_model", name, pretrained=False, num_classes=CLASSES, **settings)


def _smp(name: str) -> Any:
    return built(f"segmentation_models_pytorch:{name}", "resnet18", encoder_weights=None, classes=1)


def _efficientnet() -> Any:
    package = importlib.import_module("efficientnet_pytorch")
    return package.EfficientNet.from_name("efficientnet-b0", override_params={"num_classes": CLASSES, "image_size": 32})


PATCHED = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
SMALL_HF = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = patterns(3, 32, 32)
MASKS = masks(3, 32, 32)
CASES = [
    Case("ResNet-18", "torchvision", lambda: _torchvision("resnet18"), IMAGES),
    Case("MNASNet", "torchvision", lambda: _torchvision("mnasnet0_5"), IMAGES),
    Case("DenseNet-121", "torchvision", lambda: _torchvision("densenet121"), IMAGES),
    Case("ShuffleNet v2", "torchvision", lambda: _torchvision("shufflenet_v2_x0_5"), IMAGES),
    Case("MobileNet v3", "torchvision", lambda: _torchvision("mobilenet_v3_small"), IMAGES),
    Case("SqueezeNet", "torchvision", lambda: _torchvision("squeezenet1_1"), IMAGES, lr=3e-4),
    Case("RegNet", "torchvision", lambda: _torchvision("regnet_y_400mf"), IMAGES),
    Case("ConvNeXt", "timm", lambda: _timm("convnext_atto"), IMAGES),
    Case("EfficientNet", "efficientnet-pytorch", _efficientnet, IMAGES),
    Case("ResNeXt", "timm", lambda: _timm("resnext26ts"), IMAGES),
    Case("GhostNet", "timm", lambda: _timm("ghostnet_050"), IMAGES),
    Case("MobileNet v4", "timm", lambda: _timm("mobilenetv4_conv_small"), IMAGES),
    Case(
        "ViT",
        "timm",
        lambda: _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4),
        IMAGES,
    ),
    Case(
        "Swin",
        "timm",
        lambda: _timm(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=32, depths=(1, 1), num_heads=(2, 4)
        ),
        IMAGES,
    ),
    Case("PoolFormer", "timm", lambda: _timm("poolformer_s12"), IMAGES),
    Case(
        "MLP-Mixer",
        "timm",
        lambda: built(
            "timm.models.mlp_mixer:MlpMixer", img_size=32, patch_size=8, embed_dim=64, num_blocks=2, num_classes=CLASSES
        ),
        IMAGES,
    ),
    Case(
        "ConvMixer",
        "timm",
        lambda: built("timm.models.convmixer:ConvMixer", dim=64, depth=3, patch_size=4, num_classes=CLASSES),
        IMAGES,
    ),
    Case("NFNet", "timm", lambda: _timm("nfnet_l0"), IMAGES),
    Case("ViT", "vit-pytorch", lambda: built("vit_pytorch:ViT", dim_head=16, **PATCHED), IMAGES),
    Case("SimpleViT", "vit-pytorch", lambda: built("vit_pytorch:SimpleViT", dim_head=16, **PATCHED), IMAGES),
    Case(
        "CCT",
        "vit-pytorch",
        lambda: built(
            "vit_pytorch.cct:CCT",
            img_size=32,
            embedding_dim=64,
            n_conv_layers=1,
            num_layers=2,
            num_heads=4,
            num_classes=CLASSES,
            positional_embedding="learnable",
        ),
        IMAGES,
    ),
    Case(
        "CaiT",
        "vit-pytorch",
        lambda: built("vit_pytorch.cait:CaiT", cls_depth=1, dim_head=16, **PATCHED),
        IMAGES,
    ),
    Case(
        "MLP-Mixer",
        "mlp-mixer-pytorch",
        lambda: built(
            "mlp_mixer_pytorch:MLPMixer", image_size=32, channels=3, patch_size=8, dim=64, depth=2, num_classes=CLASSES
        ),
        IMAGES,
    ),
    Case(
        "gMLP for images",
        "g-mlp-pytorch",
        lambda: built("g_mlp_pytorch:gMLPVision", image_size=32, patch_size=8, num_classes=CLASSES, dim=64, depth=2),
        IMAGES,
    ),
    Case(
        "Perceiver",
        "perceiver-pytorch",
        lambda: built(
            "perceiver_pytorch:Perceiver",
            input_channels=3,
            input_axis=2,
            num_freq_bands=4,
            max_freq=8.0,
            depth=2,
            num_latents=16,
            latent_dim=64,
            num_classes=CLASSES,
            latent_heads=4,
            latent_dim_head=16,
            cross_dim_head=16,
        ),
        patterns(32, 32, 3),
    ),
    Case(
        "ViT",
        "transformers",
        lambda: from_config(
            "ViTForImageClassification", "ViTConfig", num_labels=CLASSES, intermediate_size=128, **SMALL_HF
        ),
        images_by_name("pixel_values", 3, 32, 32),
    ),
    Case(
        "Swin",
        "transformers",
        lambda: from_config(
            "SwinForImageClassification",
            "SwinConfig",
            num_labels=CLASSES,
            image_size=32,
            patch_size=4,
            embed_dim=32,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
        ),
        images_by_name("pixel_values", 3, 32, 32),
    ),
    Case(
        "ResNet",
        "transformers",
        lambda: from_config(
            "ResNetForImageClassification",
            "ResNetConfig",
            num_labels=CLASSES,
            embedding_size=32,
            hidden_sizes=[32, 64, 128, 128],
            depths=[1, 1, 1, 1],
            layer_type="basic",
        ),
        images_by_name("pixel_values", 3, 32, 32),
    ),
    Case("U-Net with a ResNet", "segmentation-models-pytorch", lambda: _smp("Unet"), MASKS, "bce_with_logits"),
    Case("FPN", "segmentation-models-pytorch", lambda: _smp("FPN"), MASKS, "bce_with_logits"),
    Case("DeepLab v3+", "segmentation-models-pytorch", lambda: _smp("DeepLabV3Plus"), MASKS, "bce_with_logits"),
    Case(
        "U-Net",
        "monai",
        lambda: built(
            "monai.networks.nets:UNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(16, 32, 64),
            strides=(2, 2),
            num_res_units=2,
        ),
        masks(1, 32, 32),
        "bce_with_logits",
    ),
    Case(
        "SegResNet",
        "monai",
        lambda: built("monai.networks.nets:SegResNet", spatial_dims=2, init_filters=8, in_channels=1, out_channels=1),
        masks(1, 32, 32),
        "bce_with_logits",
    ),
    Case(
        "UNETR",
        "monai",
        lambda: built(
            "monai.networks.nets:UNETR",
            in_channels=1,
            out_channels=1,
            img_size=32,
            spatial_dims=2,
            feature_size=8,
            hidden_size=64,
            mlp_dim=128,
            num_heads=4,
        ),
        masks(1, 32, 32),
        "bce_with_logits",
    ),
    Case(
        "Autoencoder",
        "monai",
        lambda: built(
            "monai.networks.nets:AutoEncoder",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(16, 32),
            strides=(2, 2),
        ),
        denoised(1, 32, 32),
        "mse",
    ),
    Case(
        "U-Net of diffusion",
        "denoising-diffusion-pytorch",
        lambda: built("denoising_diffusion_pytorch:Unet", dim=16, dim_mults=(1, 2), channels=3, flash_attn=False),
        noisy_at_times(3, 16, 16, steps=100),
        "mse",
    ),
]
