"""Modules for texts and other sequences of words."""

from __future__ import annotations

from typing import Any

from benchmarks.modules.case import Case, built, from_config
from benchmarks.modules.data import CLASSES, VOCABULARY, next_words, words

LENGTH = 32
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": LENGTH + 2, "num_labels": CLASSES, "pad_token_id": 1,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": LENGTH, "use_cache": False,
}  # fmt: skip


def _x_transformer(kind: str, **settings: Any) -> Any:
    layers = built(f"x_transformers:{kind}", dim=64, depth=2, heads=4, attn_dim_head=16, **settings)
    return built("x_transformers:TransformerWrapper", num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)


SMALL = {"num_tokens": VOCABULARY, "dim": 64, "depth": 2}
CASES = [
    Case(
        "BERT",
        "transformers",
        lambda: from_config("BertForSequenceClassification", "BertConfig", **BERT),
        words(LENGTH, by_name=True),
    ),
    Case(
        "DistilBERT",
        "transformers",
        lambda: from_config(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=64,
            n_layers=2,
            n_heads=4,
            hidden_dim=128,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
        ),
        words(LENGTH, by_name=True),
    ),
    Case(
        "RoBERTa",
        "transformers",
        lambda: from_config("RobertaForSequenceClassification", "RobertaConfig", **BERT),
        words(LENGTH, by_name=True),
    ),
    Case(
        "ALBERT",
        "transformers",
        lambda: from_config("AlbertForSequenceClassification", "AlbertConfig", **BERT),
        words(LENGTH, by_name=True),
    ),
    Case(
        "ELECTRA",
        "transformers",
        lambda: from_config("ElectraForSequenceClassification", "ElectraConfig", embedding_size=32, **BERT),
        words(LENGTH, by_name=True),
    ),
    Case(
        "DeBERTa v2",
        "transformers",
        lambda: from_config("DebertaV2ForSequenceClassification", "DebertaV2Config", **BERT),
        words(LENGTH, by_name=True),
    ),
    Case(
        "GPT-2",
        "transformers",
        lambda: from_config(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            use_cache=False,
        ),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "GPT-NeoX",
        "transformers",
        lambda: from_config(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            **{name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
        ),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "Llama",
        "transformers",
        lambda: from_config("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "Qwen2",
        "transformers",
        lambda: from_config("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "Mixtral",
        "transformers",
        lambda: from_config("MixtralForCausalLM", "MixtralConfig", num_local_experts=2, num_experts_per_tok=1, **LLAMA),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "T5",
        "transformers",
        lambda: from_config(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "Mamba",
        "transformers",
        lambda: from_config(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            use_cache=False,
        ),
        next_words(LENGTH, by_name=True),
    ),
    Case(
        "Decoder with rotary positions",
        "x-transformers",
        lambda: _x_transformer("Decoder", rotary_pos_emb=True),
        next_words(LENGTH),
    ),
    Case("Encoder with GLU", "x-transformers", lambda: _x_transformer("Encoder", ff_glu=True), next_words(LENGTH)),
    Case(
        "Performer",
        "performer-pytorch",
        lambda: built("performer_pytorch:PerformerLM", max_seq_len=LENGTH, heads=4, dim_head=16, **SMALL),
        next_words(LENGTH),
    ),
    Case(
        "Linformer",
        "linformer",
        lambda: built("linformer:LinformerLM", seq_len=LENGTH, heads=4, k=16, **SMALL),
        next_words(LENGTH),
    ),
    Case(
        "Reformer",
        "reformer-pytorch",
        lambda: built(
            "reformer_pytorch:ReformerLM", max_seq_len=LENGTH, heads=4, bucket_size=8, n_hashes=2, causal=True, **SMALL
        ),
        next_words(LENGTH),
    ),
    Case(
        "gMLP",
        "g-mlp-pytorch",
        lambda: built("g_mlp_pytorch:gMLP", seq_len=LENGTH, causal=True, **SMALL),
        next_words(LENGTH),
    ),
    Case(
        "Transformer with local attention",
        "local-attention",
        lambda: built(
            "local_attention:LocalTransformer",
            max_seq_len=LENGTH,
            causal=True,
            local_attn_window_size=16,
            heads=4,
            dim_head=16,
            **SMALL,
        ),
        next_words(LENGTH),
    ),
]
