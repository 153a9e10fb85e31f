"""Modules for tables, sound, series and graphs."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.modules.case import Case, built, from_config
from benchmarks.modules.data import CLASSES, denoised, fields, images_by_name, mixed_table, table, values


def _mamba() -> Any:
    package = importlib.import_module("mambapy.mamba")
    return package.Mamba(package.MambaConfig(d_model=16, n_layers=2))


CLICKS = {"field_dims": [20] * 6, "embed_dim": 8}
CASES = [
    Case(
        "TabNet",
        "pytorch-tabnet",
        lambda: built("pytorch_tabnet.tab_network:TabNetNoEmbeddings", 10, CLASSES, virtual_batch_size=32),
        table(10),
    ),
    Case(
        "MLP",
        "rtdl_revisiting_models",
        lambda: built("rtdl_revisiting_models:MLP", d_in=10, d_out=CLASSES, n_blocks=2, d_block=64, dropout=0.1),
        table(10),
    ),
    Case(
        "ResNet",
        "rtdl_revisiting_models",
        lambda: built(
            "rtdl_revisiting_models:ResNet",
            d_in=10,
            d_out=1,
            n_blocks=2,
            d_block=64,
            d_hidden=None,
            d_hidden_multiplier=2.0,
            dropout1=0.1,
            dropout2=0.0,
        ),
        values(10),
        "mse",
    ),
    Case(
        "FT-Transformer",
        "rtdl_revisiting_models",
        lambda: built(
            "rtdl_revisiting_models:FTTransformer",
            n_cont_features=5,
            cat_cardinalities=[4] * 3,
            d_out=1,
            n_blocks=2,
            d_block=64,
            attention_n_heads=4,
            attention_dropout=0.1,
            ffn_d_hidden=None,
            ffn_d_hidden_multiplier=4 / 3,
            ffn_dropout=0.1,
            residual_dropout=0.0,
        ),
        mixed_table(3, 5, 4, numbers_first=True),
        "bce_with_logits",
    ),
    Case(
        "TabTransformer",
        "tab-transformer-pytorch",
        lambda: built(
            "tab_transformer_pytorch:TabTransformer",
            categories=(4,) * 3,
            num_continuous=5,
            dim=32,
            dim_out=1,
            depth=2,
            heads=4,
            mlp_act=torch.nn.ReLU(),
            dim_head=16,
        ),
        mixed_table(3, 5, 4),
        "bce_with_logits",
    ),
    Case(
        "FT-Transformer",
        "tab-transformer-pytorch",
        lambda: built(
            "tab_transformer_pytorch:FTTransformer",
            categories=(4,) * 3,
            num_continuous=5,
            dim=32,
            dim_out=1,
            depth=2,
            heads=4,
            dim_head=16,
        ),
        mixed_table(3, 5, 4),
        "bce_with_logits",
    ),
    Case(
        "DeepFM",
        "torchfm",
        lambda: built("torchfm.model.dfm:DeepFactorizationMachineModel", mlp_dims=(64, 64), dropout=0.1, **CLICKS),
        fields(6, 20),
        "torch.nn.functional:binary_cross_entropy",
    ),
    Case(
        "Deep and cross network",
        "torchfm",
        lambda: built(
            "torchfm.model.dcn:DeepCrossNetworkModel", num_layers=2, mlp_dims=(64, 64), dropout=0.1, **CLICKS
        ),
        fields(6, 20),
        "torch.nn.functional:binary_cross_entropy",
    ),
    Case(
        "Wide and deep",
        "torchfm",
        lambda: built("torchfm.model.wd:WideAndDeepModel", mlp_dims=(64, 64), dropout=0.1, **CLICKS),
        fields(6, 20),
        "torch.nn.functional:binary_cross_entropy",
    ),
    Case(
        "MLP",
        "torch-geometric",
        lambda: built("torch_geometric.nn.models:MLP", [10, 64, 64, CLASSES], dropout=0.1),
        table(10),
    ),
    Case("KAN", "pykan", lambda: built("kan:KAN", width=[10, 8, CLASSES], grid=3, k=3, auto_save=False), table(10)),
    Case("Mamba", "mambapy", _mamba, denoised(16, 16), "mse"),
    Case(
        "SIREN",
        "siren-pytorch",
        lambda: built("siren_pytorch:SirenNet", dim_in=2, dim_hidden=64, dim_out=1, num_layers=3, w0_initial=10.0),
        values(2),
        "mse",
        lr=3e-4,
    ),
    Case(
        "TCN",
        "pytorch-tcn",
        lambda: built("pytorch_tcn:TCN", 4, [16, 16, 4], kernel_size=3, use_norm="weight_norm"),
        denoised(4, 32),
        "mse",
    ),
    Case(
        "Wav2Vec2",
        "transformers",
        lambda: from_config(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            conv_dim=(32, 32),
            conv_kernel=(10, 3),
            conv_stride=(5, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            classifier_proj_size=32,
            num_labels=CLASSES,
        ),
        images_by_name("input_values", 400),
    ),
]
