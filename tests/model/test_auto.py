"""Loading a tokenizer alone stays cheap, and the Auto classes find ours all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from glmexp.model.auto import known_tokenizer

TINY = Path(__file__).parents[2] / "glmexp" / "model" / "tiny"
NAMES = ("tiny", "tiny_chatglm", "tiny_chatglm2", "tiny_qwen2")
COLD = f"""
import sys
import glmexp.model
from glmexp.model.auto import known_tokenizer
from glmexp.model.renderer import renderer
for name in {NAMES}:
    tokenizer = known_tokenizer({str(TINY)!r} + "/" + name)
    renderer("qwen2" if "qwen2" in name else "chatglm3", tokenizer).fingerprint
loaded = {{"torch", "transformers.configuration_utils", "transformers.modeling_utils"}} & set(sys.modules)
assert not loaded, loaded
import transformers.modeling_layers  # loads the Auto classes while it is itself only half loaded
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
folder = {str(TINY)!r} + "/tiny"
assert type(AutoTokenizer.from_pretrained(folder)) is glmexp.model.ChatGLM3Tokenizer
config = AutoConfig.from_pretrained(folder)
assert type(config) is glmexp.model.ChatGLM2Config
assert type(AutoModelForCausalLM.from_pretrained(folder)) is glmexp.model.ChatGLM2ForConditionalGeneration
assert type(AutoModel.from_config(config)) is glmexp.model.ChatGLM2ForConditionalGeneration
"""


def test_tokenizers_load_no_torch_and_importing_the_package_registers_all_classes() -> None:
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_known_tokenizer_is_the_one_that_auto_tokenizer_gives(name: str) -> None:
    folder = str(TINY / name)
    found, wanted = known_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(wanted)
    text = "今天 good  day\n[MASK]<|im_end|><sop></s>"
    assert found(text)["input_ids"] == wanted(text)["input_ids"]
    assert found.get_vocab() == wanted.get_vocab()
    assert found.chat_template == wanted.chat_template
    assert (found.pad_token_id, found.model_max_length) == (wanted.pad_token_id, wanted.model_max_length)


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ('{"model_type": "llama"}', "{}"),
        ('{"model_type": "qwen2"}', '{"tokenizer_class": "Qwen2Tokenizer", "auto_map": {}}'),
        ('{"model_type": "qwen2"}', '{"tokenizer_class": "OtherTokenizer"}'),
        ('{"model_type": "chatglm"}', '{"tokenizer_class": "OtherTokenizer"}'),
    ],
)
def test_what_only_auto_tokenizer_can_tell_is_left_to_it(config: str, own: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer_config.json").write_text(own)
    assert known_tokenizer(str(tmp_path)) is None
    assert known_tokenizer("owner/name-of-the-hub") is None
