"""Real folders of embedding models and rerankers, tiny and random, by transformers' names.

`make_tiny_encoder(tmp_path / "m", "bert")` writes a folder that sentence-transformers and
transformers load like any other: that is how the vectors in `reference_vectors.py` were made.
Weights come from NumPy's frozen `RandomState`, so they are the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
PAD, CLS, SEP = 256, 257, 258
VOCAB = 256 + len(SPECIAL)
HIDDEN, INNER, HEADS, LAYERS = 32, 48, 4, 4

ENCODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "max_position_embeddings": 128,
}
BERT = ENCODER | {"hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12}
# Positions begin after the padding's id.
ROBERTA = BERT | {
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 128 + PAD + 1,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
MODERNBERT = ENCODER | {
    "hidden_activation": "gelu",
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "cls_token_id": CLS,
    "sep_token_id": SEP,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
    "classifier_pooling": "mean",
}
QWEN3 = ENCODER | {
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
CONFIGS = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "modernbert": MODERNBERT,
    "qwen3": QWEN3,
}
NAMES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "modernbert": "ModernBert", "qwen3": "Qwen3"}  # fmt: skip

Weights = dict[str, NDArray[np.float32]]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def make_tiny_encoder(
    folder: Path,
    model_type: str = "bert",
    *,
    reranker: bool = False,
    pooling: str | None = "mean",
    normalize: bool = True,
    dense: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """pooling: sentence-transformers' mode; None leaves its files out. dense: outputs of a layer
    after the pooling. `config` goes into config.json."""
    folder.mkdir(parents=True)
    kind = "ForSequenceClassification" if reranker else "Model"
    base = {"model_type": model_type, "architectures": [NAMES[model_type] + kind]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if reranker else {}
    write(folder / "config.json", {**base, **CONFIGS[model_type], **labels, **config})
    save_file(weights(model_type, reranker, seed), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, model_type)
    if pooling is not None and not reranker:
        write_modules(folder, pooling, normalize, dense, seed)
    return folder


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1))


def write_modules(
    folder: Path, pooling: str, normalize: bool, dense: int | None, seed: int
) -> None:
    prefix = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, f"pooling_mode_{pooling}": True},
    )
    if dense is not None:
        modules.append(("2_Dense", "Dense"))
        settings = {"in_features": HIDDEN, "out_features": dense, "bias": True}
        activation = "torch.nn.modules.activation.Tanh"
        write(folder / "2_Dense" / "config.json", {**settings, "activation_function": activation})
        drawn = np.random.RandomState(seed + 1)
        layer = {
            "linear.weight": drawn.standard_normal((dense, HIDDEN)).astype(np.float32),
            "linear.bias": drawn.standard_normal(dense).astype(np.float32),
        }
        save_file(layer, folder / "2_Dense" / "model.safetensors", {"format": "pt"})
    if normalize:
        modules.append(("9_Normalize", "Normalize"))
    write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )


def write_tokenizer(folder: Path, model_type: str) -> None:
    """A token a byte, between the special tokens of the family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate((*alphabet, *SPECIAL))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    single, pair = {
        "qwen3": ("$A [SEP]", "$A [SEP] $B [SEP]"),
        "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
        "xlm-roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    }.get(model_type, ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}  # fmt: skip
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (model_type == "bert")
    write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128, **settings, "model_input_names": names},
    )  # fmt: skip


def weights(model_type: str, reranker: bool, seed: int) -> Weights:
    drawn = np.random.RandomState(seed)
    made: Weights = {}
    for name, shape in shapes(model_type, reranker):
        values = drawn.standard_normal(shape)
        is_scale = name.endswith("weight") and len(shape) == 1
        made[name] = (1 + 0.1 * values if is_scale else 0.2 * values).astype(np.float32)
    return made


def shapes(model_type: str, reranker: bool) -> Shapes:
    match model_type:
        case "modernbert":
            prefix, body = "model.", modernbert()
            head = (("head.dense.weight", (HIDDEN, HIDDEN)), ("head.norm.weight", (HIDDEN,)), *linear("classifier", HIDDEN, 1))  # fmt: skip
        case "qwen3":
            prefix, body, head = "", qwen3(), ()
        case "bert":
            prefix, body = "bert.", bert(CONFIGS[model_type], pooler=True)
            head = tuple(linear("classifier", HIDDEN, 1))
        case _:
            prefix, body = "roberta.", bert(CONFIGS[model_type], pooler=not reranker)
            head = (*linear("classifier.dense", HIDDEN, HIDDEN), *linear("classifier.out_proj", HIDDEN, 1))  # fmt: skip
    for name, shape in body:
        yield (prefix if reranker else "") + name, shape
    if reranker:
        yield from head


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def norm(name: str) -> Shapes:
    yield f"{name}.weight", (HIDDEN,)
    yield f"{name}.bias", (HIDDEN,)


def bert(config: dict[str, Any], pooler: bool) -> Shapes:
    yield "embeddings.word_embeddings.weight", (VOCAB, HIDDEN)
    yield (
        "embeddings.position_embeddings.weight",
        (config["max_position_embeddings"], HIDDEN),
    )
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], HIDDEN)
    yield from norm("embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{part}", HIDDEN, HIDDEN)
        yield from linear(f"{layer}.attention.output.dense", HIDDEN, HIDDEN)
        yield from norm(f"{layer}.attention.output.LayerNorm")
        yield from linear(f"{layer}.intermediate.dense", HIDDEN, INNER)
        yield from linear(f"{layer}.output.dense", INNER, HIDDEN)
        yield from norm(f"{layer}.output.LayerNorm")
    if pooler:
        yield from linear("pooler.dense", HIDDEN, HIDDEN)


def modernbert() -> Shapes:
    yield "embeddings.tok_embeddings.weight", (VOCAB, HIDDEN)
    yield "embeddings.norm.weight", (HIDDEN,)
    for index in range(LAYERS):
        layer = f"layers.{index}"
        if index:
            yield f"{layer}.attn_norm.weight", (HIDDEN,)
        yield f"{layer}.attn.Wqkv.weight", (3 * HIDDEN, HIDDEN)
        yield f"{layer}.attn.Wo.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.mlp_norm.weight", (HIDDEN,)
        yield f"{layer}.mlp.Wi.weight", (2 * INNER, HIDDEN)
        yield f"{layer}.mlp.Wo.weight", (HIDDEN, INNER)
    yield "final_norm.weight", (HIDDEN,)


def qwen3() -> Shapes:
    yield "embed_tokens.weight", (VOCAB, HIDDEN)
    for index in range(LAYERS):
        layer = f"layers.{index}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.self_attn.q_proj.weight", (HEADS * 8, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (2 * 8, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (2 * 8, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * 8)
        yield f"{layer}.self_attn.q_norm.weight", (8,)
        yield f"{layer}.self_attn.k_norm.weight", (8,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
    yield "norm.weight", (HIDDEN,)
