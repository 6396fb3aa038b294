"""Real folders of embedding models and rerankers, tiny and random, by transformers' names.

`make_tiny_encoder(tmp_path / "m", "bert")` writes a folder that sentence-transformers and
transformers load like any other: that is how `references/make_tiny_encoders.py` made the vectors
that tests expect.
Weights come from NumPy's frozen `RandomState`, so they are the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
GEMMA3 = ENCODER | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
# The padding's id is the one from which this architecture counts positions.
MPNET = ENCODER | {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 128 + 2,
    "relative_attention_num_buckets": 32,
    "pad_token_id": 1,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
}
DISTILBERT = {
    "dim": HIDDEN,
    "hidden_dim": INNER,
    "n_heads": HEADS,
    "n_layers": LAYERS,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "max_position_embeddings": 128,
    "activation": "gelu",
}
CONFIGS = {
    "bert": BERT,
    "camembert": ROBERTA,
    "distilbert": DISTILBERT,
    "gemma3_text": GEMMA3,
    "modernbert": MODERNBERT,
    "mpnet": MPNET,
    "qwen3": QWEN3,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}
NAMES = {
    "bert": "Bert",
    "camembert": "Camembert",
    "distilbert": "DistilBert",
    "gemma3_text": "Gemma3Text",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "qwen3": "Qwen3",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
}
CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
NO, YES = VOCAB + len(CHAT), VOCAB + len(CHAT) + 1
JUDGING = QWEN3 | {"vocab_size": YES + 1, "max_position_embeddings": 1024, "num_labels": 1}
"""A tiny Qwen3-Reranker."""

SAID = ("hello world", "a", "Grüße, 世界!", "The quick brown fox jumps over the lazy dog near the river bank.", "one two three four five six " * 3 + "seven eight nine")  # fmt: skip
QUERY = "what is a fox?"
EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert-mean": {"pooling": "mean_tokens"},
    "bert-cls": {"pooling": "cls_token", "normalize": False},
    "bert-dense": {"pooling": "mean_tokens", "dense": (12,)},
    "bert-max": {"pooling": "max_tokens"},
    "bert-sqrt": {"pooling": "mean_sqrt_len_tokens", "normalize": False},
    "bert-weighted": {"pooling": "weightedmean_tokens"},
    "bert-relu": {"pooling": "mean_tokens", "dense": (12,), "activation": "ReLU"},
    "camembert": {"pooling": "mean_tokens"},
    "distilbert": {"pooling": "mean_tokens"},
    "gemma3_text": {"pooling": "mean_tokens", "dense": (48, 32), "activation": "Identity"},
    "gemma3_text-causal": {"pooling": "lasttoken", "use_bidirectional_attention": False},
    "mpnet": {"pooling": "mean_tokens"},
    "roberta": {"pooling": "mean_tokens"},
    "xlm-roberta": {"pooling": "cls_token"},
    "modernbert": {"pooling": "mean_tokens"},
    "qwen3": {"pooling": "lasttoken"},
}
"""Embedding models whose vectors `references/tiny_encoders.json` has, by their names there."""
RERANKERS = ("bert", "camembert", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta")
ROLES = """{%- set said = namespace(system='Judge it.', query='', document='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set said.system = message.content -%}
{%- elif message.role == 'query' -%}{%- set said.query = message.content -%}
{%- elif message.role == 'document' -%}{%- set said.document = message.content -%}{%- endif -%}
{%- endfor -%}
<|im_start|>{{ said.system }}: {{ said.query }} / {{ said.document }}<|im_end|>"""
"""A chat template that a pair can be put into."""
JUDGES: dict[str, dict[str, Any]] = {
    "Qwen3-Reranker-tied": {},
    "Qwen3-Reranker-untied": {"tie_word_embeddings": False, "seed": 3},
    "Qwen3-Reranker-seq-cls": {"reranker": True},
    "template": {"template": ROLES, "classifier_from_token": ["no", "yes"]},
}
"""Tiny Qwen3-Rerankers, by their names in the references."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ASKED = "Find foxes"
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""The texts of Qwen3-Reranker's model card before and after the instruction, query and document."""

Weights = dict[str, NDArray[np.float32]]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def make_tiny_encoder(
    folder: Path,
    model_type: str = "bert",
    *,
    reranker: bool = False,
    pooling: str | None = "mean",
    normalize: bool = True,
    dense: Sequence[int] = (),
    activation: str = "Tanh",
    seed: int = 0,
    **config: Any,
) -> Path:
    """pooling: sentence-transformers' mode; None leaves its files out. dense: outputs of layers
    after the pooling, of which `activation` is the last one's. `config` goes into config.json."""
    folder.mkdir(parents=True)
    kind = "ForSequenceClassification" if reranker else "Model"
    base = {"model_type": model_type, "architectures": [NAMES[model_type] + kind]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if reranker else {}
    write(folder / "config.json", {**base, **CONFIGS[model_type], **labels, **config})
    save_file(weights(model_type, reranker, seed), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, model_type)
    if pooling is not None and not reranker:
        write_modules(folder, pooling, normalize, dense, activation, seed)
    return folder


def make_tiny_judge(
    folder: Path, *, reranker: bool = False, template: str = "", seed: int = 0, **config: Any
) -> Path:
    """Write a tiny Qwen3-Reranker, which answers with yes or no; or, with `reranker`, as it is
    made into a classifier. template: the chat template."""
    folder.mkdir(parents=True)
    kind = "ForSequenceClassification" if reranker else "ForCausalLM"
    base = {"model_type": "qwen3", "architectures": [f"Qwen3{kind}"], **JUDGING, **config}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if reranker else {}
    write(folder / "config.json", base | labels)
    is_tied = base["tie_word_embeddings"] or reranker
    made = {
        f"model.{name}": array
        for name, array in drawn(qwen3(vocabulary=JUDGING["vocab_size"]), seed).items()
    }
    if reranker:
        made |= drawn([("score.weight", (1, HIDDEN))], seed + 1)
    elif not is_tied:
        made |= drawn([("lm_head.weight", (JUDGING["vocab_size"], HIDDEN))], seed + 1)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, "qwen3", chat=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    length = {"model_max_length": JUDGING["max_position_embeddings"]}
    said = {"chat_template": template} if template else {}
    write(folder / "tokenizer_config.json", settings | length | said)
    return folder


def type_of(name: str) -> str:
    """Return the `model_type` of one of `EMBEDDERS`."""
    return name if name in CONFIGS else name.rpartition("-")[0]


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1))


def write_modules(
    folder: Path,
    pooling: str,
    normalize: bool,
    dense: Sequence[int],
    activation: str,
    seed: int,
) -> None:
    prefix = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, f"pooling_mode_{pooling}": True},
    )
    inputs = HIDDEN
    for index, outputs in enumerate(dense):
        path = f"{index + 2}_Dense"
        modules.append((path, "Dense"))
        is_plain = index < len(dense) - 1 or activation == "Identity"
        name = "linear.Identity" if is_plain else f"activation.{activation}"
        settings = {"in_features": inputs, "out_features": outputs, "bias": True}
        activated = {"activation_function": f"torch.nn.modules.{name}"}
        write(folder / path / "config.json", settings | activated)
        numbers = np.random.RandomState(seed + 1 + index)
        layer = {
            "linear.weight": numbers.standard_normal((outputs, inputs)).astype(np.float32),
            "linear.bias": numbers.standard_normal(outputs).astype(np.float32),
        }
        save_file(layer, folder / path / "model.safetensors", {"format": "pt"})
        inputs = outputs
    if normalize:
        modules.append(("9_Normalize", "Normalize"))
    write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )


def write_tokenizer(folder: Path, model_type: str, *, chat: bool = False) -> None:
    """A token a byte, between the special tokens of the family. chat: with tokens of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    more = (*CHAT, "no", "yes") if chat else ()
    vocabulary = {piece: index for index, piece in enumerate((*alphabet, *SPECIAL, *more))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *(CHAT if chat else ())])
    single, pair = {
        "qwen3": ("$A [SEP]", "$A [SEP] $B [SEP]"),
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "distilbert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
        "modernbert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    }.get(model_type, ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"))
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
    return drawn(shapes(model_type, reranker), seed)


def drawn(named: Iterable[tuple[str, tuple[int, ...]]], seed: int) -> Weights:
    numbers = np.random.RandomState(seed)
    made: Weights = {}
    for name, shape in named:
        values = numbers.standard_normal(shape)
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
        case "gemma3_text":
            prefix, body, head = "", gemma3(), ()
        case "distilbert":
            prefix, body = "distilbert.", distilbert()
            head = (*linear("pre_classifier", HIDDEN, HIDDEN), *linear("classifier", HIDDEN, 1))
        case "mpnet":
            prefix, body = "mpnet.", mpnet()
            head = (*linear("classifier.dense", HIDDEN, HIDDEN), *linear("classifier.out_proj", HIDDEN, 1))  # fmt: skip
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


def distilbert() -> Shapes:
    yield "embeddings.word_embeddings.weight", (VOCAB, HIDDEN)
    yield "embeddings.position_embeddings.weight", (128, HIDDEN)
    yield from norm("embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"transformer.layer.{index}"
        for part in ("q", "k", "v", "out"):
            yield from linear(f"{layer}.attention.{part}_lin", HIDDEN, HIDDEN)
        yield from norm(f"{layer}.sa_layer_norm")
        yield from linear(f"{layer}.ffn.lin1", HIDDEN, INNER)
        yield from linear(f"{layer}.ffn.lin2", INNER, HIDDEN)
        yield from norm(f"{layer}.output_layer_norm")


def mpnet() -> Shapes:
    yield "embeddings.word_embeddings.weight", (VOCAB, HIDDEN)
    yield "embeddings.position_embeddings.weight", (MPNET["max_position_embeddings"], HIDDEN)
    yield from norm("embeddings.LayerNorm")
    yield "encoder.relative_attention_bias.weight", (32, HEADS)
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        for part in "qkvo":
            yield from linear(f"{layer}.attention.attn.{part}", HIDDEN, HIDDEN)
        yield from norm(f"{layer}.attention.LayerNorm")
        yield from linear(f"{layer}.intermediate.dense", HIDDEN, INNER)
        yield from linear(f"{layer}.output.dense", INNER, HIDDEN)
        yield from norm(f"{layer}.output.LayerNorm")


def gemma3() -> Shapes:
    yield "embed_tokens.weight", (VOCAB, HIDDEN)
    for index in range(LAYERS):
        layer = f"layers.{index}"
        yield f"{layer}.self_attn.q_proj.weight", (HEADS * 8, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (8, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (8, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * 8)
        yield f"{layer}.self_attn.q_norm.weight", (8,)
        yield f"{layer}.self_attn.k_norm.weight", (8,)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}.{place}_layernorm.weight", (HIDDEN,)
    yield "norm.weight", (HIDDEN,)


def qwen3(vocabulary: int = VOCAB) -> Shapes:
    yield "embed_tokens.weight", (vocabulary, HIDDEN)
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
