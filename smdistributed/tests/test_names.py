"""Every name of the page's table can be imported, and the names that only that
say so when they are used.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/smdistributed-names.md"
ROOTS = {"smp": "smdistributed.modelparallel.torch", "smddp": "smdistributed.dataparallel.torch"}
MODELS = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta", "t5")
# The guide's functions; "{}" is the model.
TRANSLATIONS = (
    "translate_state_dict_to_hf_{}",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_{}",
    "translate_hf_{}_state_dict_to_smdistributed",
    "translate_state_dict_to_smdistributed",
)


def _names() -> dict[str, int]:
    """Return the names of the page's table, in full, with their tiers."""
    table = PAGE.read_text().partition("<!-- names -->")[2].partition("<!-- end of names -->")[0]
    names = {}
    for row in table.splitlines():
        if match := re.match(r"\| (`.*?`) \| (\d) \|", row):
            for name in re.findall("`(.*?)`", match[1]):
                root, _, rest = name.partition(".")
                names[f"{ROOTS.get(root, root)}.{rest}"] = int(match[2])
    return names


def _is_there(name: str) -> bool:
    """Import a dotted name, as far as it is modules, and look up the rest."""
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def _missing(names: list[str]) -> list[str]:
    from smdistributed.modelparallel.torch.model import DistributedModel

    # Attributes that an instance has; the class does not show them.
    assert "self.partitioned = " in inspect.getsource(DistributedModel)
    return [
        name
        for name in names
        if not name.endswith("DistributedModel.partitioned") and not _is_there(name)
    ]


def test_every_name_is_there() -> None:
    names = _names()
    assert len(names) > 120
    assert set(names.values()) == {0, 1, 2, 3}
    assert run_ranks(1, _missing, list(names)) == [[]]


def _exported() -> list[str]:
    import smdistributed.modelparallel.torch as smp

    return list(smp.__all__)


def test_every_exported_name_is_on_the_page() -> None:
    on_page = _names()
    root = ROOTS["smp"]
    missing = []
    for name in run_ranks(1, _exported)[0]:
        full_name = f"{root}.{name}"
        # A module is there by the names in it.
        if not any(f"{listed}.".startswith(f"{full_name}.") for listed in on_page):
            missing.append(name)
    assert missing == []


def _unsupported() -> dict[str, str]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import SMPUnsupportedError

    messages = {}
    for name in (
        "DistributedTransformer",
        "DistributedTransformerLayer",
        "DistributedTransformerLMHead",
        "DistributedAttentionLayer",
        "DistributedTransformerOutputLayer",
    ):
        with pytest.raises(SMPUnsupportedError) as caught:
            getattr(smp.nn, name)(hidden_size=4)
        messages[name] = str(caught.value)
        smp.tp_register_with_module(torch.nn.TransformerEncoderLayer, getattr(smp.nn, name))
    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import hf_gpt2_transformer_init_hook

    with pytest.raises(SMPUnsupportedError) as caught:
        hf_gpt2_transformer_init_hook(None)
    messages["hook"] = str(caught.value)
    with pytest.raises(ImportError):
        from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
            translate_everything,  # noqa: F401
        )
    with pytest.raises(SMPUnsupportedError) as caught:
        smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2(
            {"transformer.seq_layers.0.x": 1}, 8
        )
    messages["state"] = str(caught.value)
    return messages


def test_what_is_not_there_says_so() -> None:
    results = run_ranks(1, _unsupported)[0]
    assert "hook" in results
    hook, state = results.pop("hook"), results.pop("state")
    for name, text in results.items():
        assert text.startswith(
            f"smp.nn.{name} is not part of this library: use the model's own layers"
        )
        assert "--use_distributed_transformer 0" in text
    assert hook.startswith("hf_gpt2_transformer_init_hook is for smp.nn.DistributedTransformer")
    assert "'transformer.seq_layers.0.x', a layer of smp.nn.DistributedTransformer" in state


def _translated() -> int:
    count = 0
    for model in MODELS:
        module = importlib.import_module(
            f"smdistributed.modelparallel.torch.nn.huggingface.{model}"
        )
        for name in TRANSLATIONS:
            entries = {"transformer.h.0.ln_1.weight": 1}
            translate = getattr(module, name.format(model))
            assert translate(entries) is entries
            assert translate(entries, max_seq_len=8) is entries
            count += 1
    return count


def test_translations_keep_names() -> None:
    assert run_ranks(1, _translated) == [35]


def _attention() -> None:
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    bias = torch.randn(1, 4, 1, 5)

    def expected(scores: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = scores.softmax(-1) @ v
        return values

    layer = smp.nn.FlashAttentionLayer(
        0.0, attention_head_size=8, scale_attn_by_layer_idx=True, layer_idx=1
    )
    scaled = scores / 8**0.5 / 2
    assert torch.allclose(layer(qkv), expected(scaled), atol=1e-6)
    assert torch.allclose(
        layer(qkv, causal=True), expected(scaled.masked_fill(later, -torch.inf)), atol=1e-6
    )
    layer = smp.nn.FlashAttentionLayer(
        0.5, scale=0.25, triton_flash_attention=True, use_alibi=True
    ).eval()
    alibi = (scores * 0.25 + bias).masked_fill(later, -torch.inf)
    assert torch.allclose(layer(qkv, bias, causal=True), expected(alibi), atol=1e-6)
    assert not torch.equal(layer.train()(qkv), layer(qkv))
    with pytest.raises(ValueError, match="needs attention_head_size"):
        smp.nn.FlashAttentionLayer()
    with pytest.raises(ValueError, match="needs layer_idx"):
        smp.nn.FlashAttentionLayer(attention_head_size=8, scale_attn_by_layer_idx=True)


def test_flash_attention_is_attention() -> None:
    run_ranks(1, _attention)
