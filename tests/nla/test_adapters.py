from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file, save_file
from torch import nn

from dragoman.errors import ConfigError, PairError
from dragoman.nla import adapters
from dragoman.subjects import Subject

IDS = torch.tensor([[5, 6, 7, 300, 4000]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def randomised(model: nn.Module) -> nn.Module:
    for parameter in adapters.attach_lora(model, rank=3, alpha=6.0):
        nn.init.normal_(parameter, std=0.1)
    return model


def snapshot(subject: Subject) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}


def assert_untouched(subject: Subject, before: dict[str, torch.Tensor]) -> None:
    after = subject.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_shared_structure_shares_every_tensor_and_no_module(tiny_llama: Subject) -> None:
    shared = adapters.share_structure(tiny_llama.model)
    pairs = list(zip(shared.named_parameters(), tiny_llama.model.named_parameters(), strict=True))
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    assert not set(map(id, shared.modules())) & set(map(id, tiny_llama.model.modules()))


def test_adapters_training_steps_and_merging_never_change_the_subject(tiny_llama: Subject) -> None:
    before, said = snapshot(tiny_llama), logits(tiny_llama.model)
    model = randomised(adapters.share_structure(tiny_llama.model))
    model(input_ids=IDS).logits.sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    adapters.merge_adapter(model)
    assert_untouched(tiny_llama, before)
    assert torch.equal(logits(tiny_llama.model), said)
    assert not torch.allclose(logits(model), said)


def test_full_training_of_a_copy_never_changes_the_subject(tiny_llama: Subject) -> None:
    before = snapshot(tiny_llama)
    model = adapters.own_weights(tiny_llama.model)
    model(input_ids=IDS).logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert_untouched(tiny_llama, before)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, (
        "tied weights stay tied"
    )


def test_a_merged_adapter_equals_the_unmerged_one(tiny_llama: Subject) -> None:
    model = randomised(adapters.share_structure(tiny_llama.model))
    unmerged = logits(model)
    adapters.merge_adapter(model)
    assert not adapters.has_adapter(model)
    torch.testing.assert_close(logits(model), unmerged, atol=1e-4, rtol=1e-4)


def test_a_disabled_adapter_is_the_base_model_and_comes_back(tiny_llama: Subject) -> None:
    model = randomised(adapters.share_structure(tiny_llama.model))
    adapted = logits(model)
    with adapters.adapter_disabled(model):
        assert torch.equal(logits(model), logits(tiny_llama.model))
    assert torch.equal(logits(model), adapted)


def test_the_adapters_start_depends_on_its_seed_alone_and_leaves_the_global_generator(
    tiny_llama: Subject,
) -> None:
    def start(seed: int) -> list[torch.Tensor]:
        return adapters.attach_lora(adapters.share_structure(tiny_llama.model), rank=2, seed=seed)

    torch.manual_seed(1)
    first, drawn = start(3), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    second, other = start(3), start(4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_all_linear_covers_every_linear_layer_of_the_blocks_and_not_the_head(tiny_llama: Subject) -> None:
    model = adapters.share_structure(tiny_llama.model)
    adapters.attach_lora(model, rank=2)
    adapted = {name.rsplit(".lora_A", 1)[0] for name, p in model.named_parameters() if ".lora_A" in name}
    linear = {name for name, m in tiny_llama.model.named_modules() if isinstance(m, nn.Linear)}
    assert adapted == linear - {"lm_head"}


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"targets": ["nose"]}, {"targets": []}])
def test_targets_and_ranks_that_train_nothing_are_refused(
    tiny_llama: Subject, wrong: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="q_proj"):
        adapters.attach_lora(adapters.share_structure(tiny_llama.model), **wrong)


@pytest.mark.parametrize("merge", [True, False])
def test_a_saved_adapter_comes_back_without_asking_a_hub(
    tiny_llama: Subject, tmp_path: Path, merge: bool
) -> None:
    model = randomised(adapters.share_structure(tiny_llama.model))
    back = adapters.share_structure(tiny_llama.model)
    with warnings.catch_warnings():
        # PEFT warns when a hub lookup fails.
        warnings.simplefilter("error")
        adapters.save_weights(model, tmp_path, base_model="org/name")
        adapters.load_weights(back, tmp_path, merge=merge)
    torch.testing.assert_close(logits(back), logits(model), atol=1e-4, rtol=1e-4)
    assert not any(p.requires_grad for p in back.parameters())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/name"


def test_pefts_own_loader_opens_a_saved_adapter(tiny_llama: Subject, tmp_path: Path) -> None:
    model = randomised(adapters.share_structure(tiny_llama.model))
    adapters.save_adapter(model, tmp_path)
    peft_model = PeftModel.from_pretrained(adapters.own_weights(tiny_llama.model), tmp_path)
    torch.testing.assert_close(logits(peft_model), logits(model), atol=1e-5, rtol=1e-5)


def test_an_adapter_loaded_for_training_has_only_its_own_weights_trainable(
    tiny_llama: Subject, tmp_path: Path
) -> None:
    adapters.save_adapter(randomised(adapters.share_structure(tiny_llama.model)), tmp_path)
    back = adapters.share_structure(tiny_llama.model)
    adapters.load_weights(back, tmp_path, merge=False, trainable=True)
    trainable = [name for name, p in back.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model."])
@pytest.mark.parametrize("sharded", [False, True])
def test_full_weights_come_back_under_other_prefixes_and_in_shards(
    tiny_llama: Subject, tmp_path: Path, prefix: str, sharded: bool
) -> None:
    model = adapters.own_weights(tiny_llama.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    adapters.save_full(model, tmp_path)
    tensors = {prefix + name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    if sharded:
        names = sorted(tensors)
        for number in range(2):
            save_file(
                {name: tensors[name] for name in names[number::2]}, tmp_path / f"part-{number}.safetensors"
            )
        index = {name: f"part-{number}.safetensors" for number in range(2) for name in names[number::2]}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    before, back = snapshot(tiny_llama), adapters.share_structure(tiny_llama.model)
    adapters.load_weights(back, tmp_path, merge=True)
    assert torch.equal(logits(back), logits(model))
    assert back.get_input_embeddings().weight is back.get_output_embeddings().weight
    assert_untouched(tiny_llama, before)


def test_weights_that_are_missing_damaged_or_of_another_model_are_refused(
    tiny_llama: Subject, tmp_path: Path
) -> None:
    def attempt() -> None:
        adapters.load_weights(adapters.share_structure(tiny_llama.model), tmp_path, merge=True)

    with pytest.raises(PairError, match="neither"):
        attempt()
    model = randomised(adapters.share_structure(tiny_llama.model))
    adapters.save_adapter(model, tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PairError, match="damaged"):
        attempt()
    save_file({name: tensor.long() for name, tensor in load(whole).items()}, weights)
    with pytest.raises(PairError, match="int64"):
        attempt()
    for value in (float("nan"), float("inf")):
        tensors = load(whole)
        tensors[sorted(tensors)[-1]][0, 0] = value
        save_file(tensors, weights)
        with pytest.raises(PairError, match="NaN or infinity"):
            attempt()
    tensors = {name: tensor[:, :-1].contiguous() for name, tensor in load(whole).items()}
    save_file(tensors, weights)
    with pytest.raises(PairError, match="shape"):
        attempt()
    save_file({name: t for name, t in tensors.items() if "layers.1." not in name}, weights)
    with pytest.raises(PairError, match="counterpart"):
        attempt()


@pytest.mark.parametrize("text", ["{", "[]", '{"peft_type": "IA3"}'])
def test_an_adapter_config_of_another_kind_is_refused(tiny_llama: Subject, tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(PairError, match="adapter"):
        adapters.load_weights(adapters.share_structure(tiny_llama.model), tmp_path, merge=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"r": 10**6}, {"rank_pattern": {"q_proj": 10**6}},
        {"r": "x"}, {"r": 2.5}, {"r": None}, {"lora_alpha": None}, {"target_modules": 5},
        {"target_modules": "(a+"}, {"target_modules": [5]}, {"bias": "zz"}, {"lora_dropout": "x"},
        {"layers_to_transform": "x"}, {"rank_pattern": [1]}, {"rank_pattern": {"(": 4}},
        {"alpha_pattern": {"q_proj": "x"}}, {"init_lora_weights": "pissa"}, {"init_lora_weights": ["olora"]},
    ],
)  # fmt: skip
def test_an_adapter_config_that_peft_stumbles_over_is_refused(
    tiny_llama: Subject, tmp_path: Path, wrong: dict[str, object]
) -> None:
    adapters.save_adapter(randomised(adapters.share_structure(tiny_llama.model)), tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    before = snapshot(tiny_llama)
    with pytest.raises(PairError):
        adapters.load_weights(adapters.share_structure(tiny_llama.model), tmp_path, merge=True)
    assert_untouched(tiny_llama, before)


def test_an_adapter_config_cannot_name_code_to_import(tiny_llama: Subject, tmp_path: Path) -> None:
    adapters.save_adapter(randomised(adapters.share_structure(tiny_llama.model)), tmp_path)
    config = tmp_path / "adapter_config.json"
    named = {"megatron_config": {"a": 1}, "megatron_core": "this"}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    adapters.load_weights(adapters.share_structure(tiny_llama.model), tmp_path, merge=True)
    assert "this" not in sys.modules


def test_a_shard_index_cannot_name_files_elsewhere(tiny_llama: Subject, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PairError, match="plain file names"):
        adapters.load_weights(adapters.share_structure(tiny_llama.model), tmp_path, merge=True)
