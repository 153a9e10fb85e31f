"""Models of transformers, from small configurations, are prepared in seconds: cut by ist, or trained whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from idletrain.job import TrainingSettings
from idletrain.nn.cuts import Cuts, CutSettings, cuts_or_whole
from idletrain.nn.ist.groups import split_share

WORDS = 50
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": WORDS,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SHARED = {**SIZES, "num_key_value_heads": 2}
_ids = torch.randint(3, WORDS, (8, 12), generator=torch.Generator().manual_seed(0))
_classes = torch.arange(8) % 2
TEXT = {"input_ids": _ids, "attention_mask": torch.ones_like(_ids)}
CLASSES, NEXT = {**TEXT, "labels": _classes}, {**TEXT, "labels": _ids}
IMAGES = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": _classes}
SOUND = {"input_values": torch.randn(8, 1600), "labels": _classes}

# For each: how it is made, a batch, the least share of its parameters that is split, and groups with their sizes.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor], float, dict[str, int]]] = {
    "BERT": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)), CLASSES, 0.8,
        {"bert.encoder.layer.0.attention.self.query": 4, "bert.encoder.layer.1.intermediate.dense": 64},
    ),
    "DistilBERT": (
        lambda: hf.DistilBertForSequenceClassification(
            hf.DistilBertConfig(
                dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=WORDS, max_position_embeddings=40
            )
        ), CLASSES, 0.8, {"distilbert.transformer.layer.0.attention.q_lin": 4},
    ),
    "RoBERTa": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES)), CLASSES, 0.8,
        {"roberta.encoder.layer.0.attention.self.query": 4},
    ),
    "ALBERT": (
        lambda: hf.AlbertForSequenceClassification(hf.AlbertConfig(**SIZES, embedding_size=16)), CLASSES, 0.8,
        {"albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query": 4},
    ),
    "GPT-2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=40, bos_token_id=0, eos_token_id=1
            )
        ), NEXT, 0.55, {"transformer.h.0.mlp.c_fc": 128},
    ),
    "Llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHARED)), NEXT, 0.8,
        {"model.layers.0.self_attn.q_proj": 2, "model.layers.0.mlp.gate_proj": 64},
    ),
    "Qwen2": (
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHARED)), NEXT, 0.8,
        {"model.layers.0.self_attn.q_proj": 2, "model.layers.0.mlp.gate_proj": 64},
    ),
    "Mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHARED, num_local_experts=4)), NEXT, 0.0, {},
    ),
    "T5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0
            )
        ), NEXT, 0.5, {"encoder.block.0.layer.1.DenseReluDense.wi": 64},
    ),
    "ViT": (
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
                patch_size=8,
            )
        ), IMAGES, 0.65, {"vit.layers.0.attention.q_proj": 4, "vit.layers.0.mlp.fc1": 64},
    ),
    "Swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ), IMAGES, 0.8, {"swin.encoder.layers.1.blocks.0.attention.q_proj": 4},
    ),
    "ConvNeXt": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, image_size=32)
        ), IMAGES, 0.65, {"convnext.encoder.stages.0.layers.0.pwconv1": 64},
    ),
    "ResNet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2])
        ), IMAGES, 0.8, {"resnet.encoder.stages.0.layers.0.layer.0.convolution": 8},
    ),
    "Mamba": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(hidden_size=32, state_size=8, num_hidden_layers=2, vocab_size=WORDS)
        ), NEXT, 0.8, {"backbone.layers.0.mixer": 64},
    ),
    "Wav2Vec2": (
        lambda: hf.Wav2Vec2ForSequenceClassification(
            hf.Wav2Vec2Config(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16),
                conv_stride=(4, 4), conv_kernel=(8, 8), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
            )
        ), SOUND, 0.7, {"wav2vec2.encoder.layers.0.attention.k_proj": 4},
    ),
}  # fmt: skip


def cuts_of_model(name: str) -> tuple[Cuts, float]:
    """The cuts, and how many seconds they took."""
    make, batch, _, _ = MODELS[name]
    torch.manual_seed(0)
    module, started = make(), time.monotonic()
    cuts = cuts_or_whole(module, batch, TrainingSettings(rounds=1, subnets=2), CutSettings())
    return cuts, time.monotonic() - started


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_prepared_in_seconds_and_cut_where_that_pays(name: str) -> None:
    _, _, least, groups = MODELS[name]
    cuts, seconds = cuts_of_model(name)
    assert seconds < 10
    share = split_share(cuts.layout)
    assert share >= least
    assert cuts.training.method == ("ist" if share >= 0.3 else "local-sgd")
    assert bool(cuts.fallback) is (share < 0.3)
    sizes = {group.name: group.size for group in cuts.layout.groups}
    assert groups.items() <= sizes.items()
