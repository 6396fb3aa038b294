"""A checkpoint's MTP head: where it is found, its forms on disk, and what it is built of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from tiny_models import VOCAB_SIZE, add_mtp_head, make_tiny_model, replace_weights

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.building import BuildPlan, build, planned
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.mtp import HeadFiles, head_in, head_of
from mlx_manager.mlx_server.models.loading.mtp import HeadInput, SharedVocabulary, build_head

KINDS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_next")
TOKENS = [[5, 90, 17, 3]]
STATES = mx.sin(mx.arange(4 * 64).reshape(4, 64) * 0.7)


def plan_of(path: Path) -> BuildPlan:
    folder = ModelFolder.read(path)
    folder.check()
    return planned(folder)


def own(plan: BuildPlan) -> HeadFiles | None:
    return head_of(plan.folder, plan.config["model_type"])


def within(path: Path, plan: BuildPlan) -> HeadFiles:
    return head_in(path, plan.folder, plan.config["model_type"])


def built(plan: BuildPlan, files: HeadFiles | None) -> tuple[nn.Module, HeadInput]:
    assert files is not None
    model, _ = build(plan)
    return build_head(files, plan, SharedVocabulary.of(model))


def logits(head: tuple[nn.Module, HeadInput]) -> mx.array:
    """Return a head's logits of some tokens, each behind some state."""
    model, given = head
    given.give(STATES, [0])
    return model(mx.array(TOKENS))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_with_its_head_in_the_folder(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "m", kind)
    plain, _ = build(plan_of(folder))
    assert own(plan_of(folder)) is None
    add_mtp_head(folder)
    model, _ = build(plan_of(folder))
    assert mx.array_equal(model(mx.array(TOKENS)), plain(mx.array(TOKENS)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_beside_the_model_is_the_one_in_its_folder(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "m", kind)
    add_mtp_head(folder, beside=tmp_path / "head")
    add_mtp_head(folder)
    plan = plan_of(folder)
    inside = logits(built(plan, own(plan)))
    assert inside.shape == (4, VOCAB_SIZE)
    assert mx.array_equal(logits(built(plan, within(tmp_path / "head", plan))), inside)
    # The whole model's folder may be named, too.
    assert mx.array_equal(logits(built(plan, within(folder, plan))), inside)


def test_a_head_may_be_a_file_beside_the_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_5")
    add_mtp_head(folder, beside=tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").rename(folder / "mtp.safetensors")
    plan = plan_of(folder)
    beside = logits(built(plan, own(plan)))
    add_mtp_head(folder)
    assert mx.array_equal(logits(built(plan_of(folder), own(plan_of(folder)))), beside)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5", "qwen3_next"])
def test_a_head_reads_the_token_and_the_state_before_it(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "m", kind)
    tensors = add_mtp_head(folder)
    plan = plan_of(folder)
    head, given = built(plan, own(plan))
    model, _ = build(plan)
    shared, body = SharedVocabulary.of(model), head
    while "layers" not in body:
        body = body["language_model" if "language_model" in body else "model"]
    parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if kind == "glm4_moe":
        parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    prefix = "model.layers.2." if kind == "glm4_moe" else "mtp."
    enorm, hnorm, joined, norm = (tensors[f"{prefix}{part}.weight"] for part in parts)
    embedded = shared.embed(mx.array(TOKENS))[0]
    if kind == "glm4_moe":
        # vLLM leaves the token at place 0 out.
        embedded[0] = 0
    eps = given.enorm.eps
    normed = [mx.fast.rms_norm(x, w, eps) for x, w in ((embedded, enorm), (STATES, hnorm))]
    hidden = body.layers[0]((mx.concatenate(normed, axis=1) @ joined.T)[None], mask="causal")
    expected = shared.logits(mx.fast.rms_norm(hidden, norm, eps))[0]
    assert mx.allclose(logits((head, given)), expected, atol=1e-4)


def in_transformers_form(tensors: dict[str, mx.array], *, centred: bool) -> dict[str, mx.array]:
    """A head's tensors as transformers stores them: experts apart, norms less one, and keys and
    values of latent attention in one product."""
    found: dict[str, mx.array] = {}
    for name, array in tensors.items():
        if match := re.fullmatch(r"(.*\.mlp)\.switch_mlp\.(.*)", name):
            for number, expert in enumerate(array):
                found[f"{match[1]}.experts.{number}.{match[2]}"] = expert
        elif centred and array.ndim == 1 and "norm" in name:
            found[name] = array - 1
        elif name.endswith("embed_q.weight"):
            values = tensors[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(-1, -2), values], axis=1)
            found[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            found[name] = array
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_form_of_a_head_is_read(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "m", kind)
    plain = mx.load(str(folder / "model.safetensors"))
    tensors = add_mtp_head(folder)
    plan = plan_of(folder)
    expected = logits(built(plan, own(plan)))
    raw = in_transformers_form(tensors, centred=kind.startswith("qwen"))
    spare = {"model.layers.2.embed_tokens.weight": mx.zeros((VOCAB_SIZE, 64))}
    spare |= {"model.layers.2.shared_head.head.weight": mx.zeros((VOCAB_SIZE, 64))}
    if kind.startswith("qwen"):
        spare = {}
    # The model's own tensors stay as they are: raw is told by the file that a head's are in.
    replace_weights(folder, dict(plain))
    head = tmp_path / "raw"
    head.mkdir()
    replace_weights(head, {**raw, **spare}, "pt")
    (head / "config.json").write_text((folder / "config.json").read_text())
    found = logits(built(plan_of(folder), within(head, plan_of(folder))))
    assert mx.allclose(found, expected, atol=1e-5)


def test_a_quantised_head_of_a_dense_model_stays_packed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_5")
    add_mtp_head(folder, beside=tmp_path / "dense")
    add_mtp_head(folder, beside=tmp_path / "head", quantize={"group_size": 32, "bits": 8})
    plan = plan_of(folder)
    head, given = built(plan, within(tmp_path / "head", plan))
    packed = [
        module for _, module in head.named_modules() if isinstance(module, nn.QuantizedLinear)
    ]
    assert len(packed) == 8
    assert isinstance(given.eh_proj, nn.QuantizedLinear)
    dense = logits(built(plan, within(tmp_path / "dense", plan)))
    assert mx.abs(logits((head, given)) - dense).max() < 0.1 * mx.abs(dense).max()


def test_a_dense_head_of_a_quantised_model_stays_dense(tmp_path: Path) -> None:
    sizes = {"group_size": 32, "bits": 4}
    folder = make_tiny_model(tmp_path / "m", "qwen3_5", quantize=sizes)
    add_mtp_head(folder)
    plan = plan_of(folder)
    head, _ = built(plan, own(plan))
    assert not [m for _, m in head.named_modules() if isinstance(m, nn.QuantizedLinear)]
    assert logits((head, _)).shape == (4, VOCAB_SIZE)


def test_a_head_that_lacks_a_part_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "deepseek_v3")
    add_mtp_head(folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    del tensors["model.layers.2.eh_proj.weight"]
    replace_weights(folder, tensors)
    with pytest.raises(ModelLoadFailed, match=r"MTP head in .*m has no .*eh_proj"):
        own(plan_of(folder))
    # The model is loaded all the same.
    build(plan_of(folder))


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "deepseek_v3")
    other = make_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(ModelLoadFailed, match=r"no MTP head in .*llama"):
        within(other, plan_of(folder))
    with pytest.raises(ModelLoadFailed, match=r"'llama' take no MTP head"):
        within(folder, plan_of(other))
    (other / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelLoadFailed):
        within(tmp_path / "nothing", plan_of(folder))
