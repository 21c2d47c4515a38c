"""Mistakes that people really make on this command line: refused before anything is loaded, word for word."""

from __future__ import annotations

import contextlib
import random
import shlex
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.config.load import write
from glmexp.config.nearest import OPTIONS_ELSEWHERE, keys, shipped_options
from tests.config.helpers import asked, config, ds_file, refusal, rows_file


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return f"data.train_file={rows_file(tmp_path / 'rows.jsonl')}"


def test_batch_numbers_that_contradict_show_the_product_and_the_one_to_leave_out(rows: str) -> None:
    text = refusal(rows, "train.batch_size=16", "train.micro_batch_size=2", "train.grad_accum=4")
    assert text == (
        "config error:\n"
        "  train.batch_size: 16 rows, but train.micro_batch_size x train.grad_accum x ranks = 2 x 4 x 1 = 8"
        " (from the command line)\n"
        "    -> leave one of the three out and it is computed: without train.batch_size it is 8, without "
        "train.grad_accum it is 8"
    )


@pytest.mark.parametrize(
    ("given", "ranks", "numbers"),
    [
        ((), 2, (8, 1, 16)),
        (("train.batch_size=16",), 2, (8, 1, 16)),
        (("train.batch_size=16", "train.micro_batch_size=2"), 2, (2, 4, 16)),
        (("train.batch_size=16", "train.grad_accum=4"), 2, (2, 4, 16)),
        (("train.micro_batch_size=3", "train.grad_accum=5"), 2, (3, 5, 30)),
        (("train.batch_size=16", "train.micro_batch_size=2", "train.grad_accum=4"), 2, (2, 4, 16)),
    ],
)
def test_two_batch_numbers_give_the_third(given: tuple[str, ...], ranks: int, numbers: tuple[int, int, int]) -> None:
    train = config(*given, f"launcher.nproc={ranks}").train
    assert (train.micro_batch_size, train.grad_accum, train.batch_size) == numbers


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    text = refusal("train.batch_size=10", "launcher.nproc=4")
    assert "10 rows cannot be split: train.grad_accum x ranks = 1 x 4 = 4 does not divide 10" in text
    assert "train.batch_size=8" in text


def test_fp16_and_bf16_both_on_in_a_file_names_both_switches_and_the_preset(tmp_path: Path, rows: str) -> None:
    file = ds_file(tmp_path / "both.json", {"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert refusal(rows, "precision=bf16", f"deepspeed.config_file={file}") == (
        "config error:\n"
        f"  {file}: fp16.enabled and bf16.enabled: both are true in this file, and precision=bf16 on the command line "
        "chooses one too: a run has one number format\n"
        "    -> switch one off in the file, and say the same with precision=fp16 or precision=bf16"
    )


def test_fp16_in_a_file_against_a_chosen_preset_names_both_places(tmp_path: Path, rows: str) -> None:
    file = ds_file(tmp_path / "fp16.json", {"fp16": {"enabled": True}})
    text = refusal(rows, "precision=bf16", f"deepspeed.config_file={file}", gpus=1)
    assert f"'bf16' (from precision=bf16 on the command line) contradicts 'fp16' (from {file}: fp16.enabled)" in text


OFFLOAD = (
    "offload.params: parameter offload needs ZeRO stage 3, and the stage is 2: DeepSpeed would ignore it without a word"
)


def test_parameter_offload_below_stage_3_offers_the_ways_out(rows: str) -> None:
    text = refusal(rows, "zero=stage2", "offload=all")
    assert text == f"config error:\n  {OFFLOAD}\n    -> offload=optimizer, or zero=stage3"


def test_parameter_offload_below_stage_3_in_a_file_is_refused_with_its_place(tmp_path: Path, rows: str) -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}
    file = ds_file(tmp_path / "offload.json", {"zero_optimization": zero})
    text = refusal(rows, f"deepspeed.config_file={file}")
    assert f"{OFFLOAD} (from {file}: zero_optimization.offload_param.device)" in text
    assert "-> offload=optimizer, or zero=stage3" in text


def test_quoted_numbers_are_numbers_wherever_they_stand(tmp_path: Path, rows: str) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "quoted.yaml").write_text('# @package _global_\noptim:\n  lr: "1e-5"\n  warmup_steps: "2"\n')
    file = ds_file(tmp_path / "lr.json", {"optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "eps": "1e-7"}}})
    ways = [
        config("--config-dir", str(tmp_path / "mine"), "+experiment=quoted", rows, "train.max_steps=4"),
        config("optim.lr=1e-5", rows),
        config("optim.lr='1e-5'", rows),
        config(f"deepspeed.config_file={file}", rows),
    ]
    assert [one.optim.lr for one in ways] == [1e-5] * 4
    assert ways[0].optim.warmup_steps == 2
    assert ways[0].optim.warmup_ratio is None, "the user's warmup_steps drops the default warmup_ratio"
    assert ways[3].optim.eps == 1e-7


def test_a_learning_rate_that_is_no_number_names_key_and_value(rows: str) -> None:
    assert refusal(rows, "optim.lr=abc") == (
        "config error:\n  optim.lr: 'abc' is not a number above 0 (from the command line)"
    )


def test_lora_targets_of_another_model_list_the_names_that_exist() -> None:
    for targets in ("[query_key_value]", "[q_proj,query_key_value]"):
        assert refusal("model=tiny_qwen2", "method=lora", f"method.target_modules={targets}") == (
            "config error:\n"
            "  method.target_modules: query_key_value matches no linear layer of qwen2 (from the command line)\n"
            "    -> names that exist: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
        )


def test_a_single_lora_target_is_kept_as_a_list() -> None:
    assert config("model=tiny_qwen2", "method.target_modules=q_proj").method.target_modules == ["q_proj"]
    assert config("model=tiny_qwen2", "method.target_modules=self_attn.q_proj").method.target_modules is not None


def test_a_path_with_signs_of_the_grammar_is_refused_with_the_quoted_form_and_the_quoted_form_works(
    tmp_path: Path,
) -> None:
    path = rows_file(tmp_path / "epoch=3,part(1) #2.jsonl")
    assert refusal(f"data.train_file={path}") == (
        "config error:\n"
        f"  data.train_file: the value {path} holds signs that Hydra's override grammar uses "
        "(= , ( ) [ ] { } : # or quotes)\n"
        f"    -> put quotes inside of the shell's: \"data.train_file='{path}'\""
    )
    assert config(f"data.train_file='{path}'").data.train_file == path


def test_a_path_in_chinese_works_with_and_without_quotes(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "数据" / "训练，一.jsonl")
    assert config(f"data.train_file={path}").data.train_file == path
    assert config(f"data.train_file='{path}'").data.train_file == path


def test_a_comma_in_a_path_is_not_cut_but_refused_with_the_three_ways_to_write_it(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "a,b.jsonl")
    text = refusal(f"data.train_file={path}")
    assert f"\"data.train_file='{path}'\"" in text
    assert f'"data.train_file=[{path}]"' in text
    assert "add -m" in text
    assert config(f"data.train_file='{path}'").data.train_file == path


def test_a_value_with_quotes_is_shown_in_a_form_that_is_read_back(tmp_path: Path) -> None:
    from glmexp.config.quoting import quoted, typed

    for path in ("it's (1).jsonl", "a\\(1).jsonl", "tail\\", "\\'", 'say "x" = 1'):
        assert config(f"run.name={quoted(path)}" if "\\" not in path and '"' not in path else "run.name=x")
        from hydra.core.override_parser.overrides_parser import OverridesParser

        assert OverridesParser.create().parse_override(f"run.name={quoted(path)}").value() == path
        (word,) = shlex.split(typed("run.dir", path))
        assert OverridesParser.create().parse_override(word).value() == path
    assert typed("run.dir", "outputs/数据/a-1") == "run.dir=outputs/数据/a-1"
    assert typed("run.dir", "数据 1") == "\"run.dir='数据 1'\""


def test_a_folder_that_holds_a_run_is_refused_unless_overwrite_or_resume_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    assert config(f"run.dir={folder}").run.dir == str(folder), "an empty folder is free"
    write(config(), folder / "config.yaml")
    assert refusal(f"run.dir={folder}") == (
        "config error:\n"
        f"  run.dir: {folder} already holds a run (from the command line)\n"
        f"    -> another folder, run.overwrite=true to replace it, or train.resume={folder} to go on with it"
    )
    assert config(f"run.dir={folder}", "run.overwrite=true").run.overwrite
    assert "holds no checkpoint: there is no checkpoints/step-<n> in it" in refusal(f"train.resume={folder}")
    (folder / "checkpoints" / "step-3").mkdir(parents=True)
    assert config(f"train.resume={folder}").train.resume == str(folder)
    said = "train.max_steps: 2, and the newest checkpoint to go on from has 3 steps behind it"
    assert said in refusal(f"train.resume={folder}", "train.max_steps=2")
    (folder / "checkpoints" / "step-1").mkdir()
    earlier = folder / "checkpoints" / "step-1"
    assert config(f"train.resume={earlier}", "train.max_steps=2").train.max_steps == 2
    assert f"hydra.sweep.dir: {folder} holds a run" in refusal("-m", "method.rank=2,4", f"hydra.sweep.dir={folder}")
    (tmp_path / "sweep.json").touch()
    assert f"run.dir: {tmp_path} holds a sweep" in refusal(f"run.dir={tmp_path}")


def test_a_search_path_that_is_not_there_is_no_silent_key(tmp_path: Path) -> None:
    assert f"hydra.searchpath: {tmp_path}/none is no folder" in refusal(f"hydra.searchpath=[{tmp_path}/none]")
    assert config(f"hydra.searchpath=[{tmp_path}]").method.name == "lora"


def test_the_launchers_local_rank_is_dropped_wherever_it_stands() -> None:
    plain = config("train.max_steps=2")
    for words in (
        ("train.max_steps=2", "--local_rank=0"),
        ("--local_rank=0", "train.max_steps=2"),
        ("--local-rank=0", "train.max_steps=2"),
        ("train.max_steps=2", "--local-rank", "3"),
    ):
        assert config(*words) == plain


def test_optimizer_offload_needs_no_compiler_since_no_deepspeed_optimizer_is_asked_for() -> None:
    from glmexp.config.ds_config import lower

    lowered = lower(config("zero=stage2", "offload=optimizer"), 1)
    assert "optimizer" not in lowered
    assert lowered["zero_force_ds_cpu_optimizer"] is False


def test_every_kind_of_mistake_is_reported_at_once() -> None:
    text = refusal(
        "method=lroa", "rank=4", "optim.lr=abc", "train.seed=1.5", "zero=stage2", "offload=all", "tracker.projct=x"
    )
    assert text.startswith("6 config errors:")
    for part in ("method has no option 'lroa'", "did you mean method=lora?", "did you mean method.rank?", "'abc'"):
        assert part in text
    for part in ("1.5 is not a whole number of at least 0", "offload.params", "did you mean tracker.project?"):
        assert part in text


def test_the_same_key_or_group_twice_is_refused() -> None:
    text = refusal("precision=fp32", "precision=bf16", "optim.lr=1", "+optim.lr=2", "eval=loss", "eval=generate")
    assert "precision: is given 2 times: precision=fp32 and precision=bf16" in text
    assert "optim.lr: is given 2 times: optim.lr=1 and +optim.lr=2" in text
    assert "eval=[loss,generate]" in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["stage=3"], ["did you mean zero=stage3?"]),
        (["zero=3"], ["did you mean zero=stage3?"]),
        (["lr=1e-4"], ["optim.lr", "method.lr"]),
        (["learning_rate=1e-4"], ["did you mean optim.lr?"]),
        (["methd=lora"], ["did you mean method=lora?"]),
        (["method.num_virtual_tokens=3"], ["belongs to method=ptuning, which is not chosen"]),
        (["eval=loss", "eval.generate.every=5"], ["eval.generate.every: the hook generate is not chosen"]),
        (["eval=null"], ["did you mean eval=none?"]),
        (["method.name=full"], ["method.name: is set by the chosen option", "-> method=full"]),
        (["~train.save_steps"], ["cannot be taken away"]),
        (["hydra.run.dir=x"], ["has no effect here", "run.dir=FOLDER"]),
        (["train"], ["did you mean entry=train?"]),
        (["--nproc=2"], ["launcher.nproc=2"]),
        (["data=alpaca"], ["data.train_file: must be set"]),
        (["optim.lr=${method.lrr}"], ["${method.lrr} cannot be resolved"]),
        (["method.lr=x"], ["method.lr: 'x' is not a number above 0"]),
        (["train.gradient_checkpointing=yes"], ["'yes' is not true or false"]),
        (["optim.schedule=cosin"], ["one of cosine, linear, constant", "optim.schedule=cosine"]),
        (["experiments=rank_and_bucket"], ["holds a grid over method.rank", "add -m"]),
        (["launcher=env"], ["no outside launcher started this process"]),
        (["--config-name", "x"], ["--config-name: is not supported"]),
        (["--resolve"], ["has no effect without --cfg"]),
        (["--cfg", "job", "-m"], ["show one configuration"]),
        (["hydra.sweep.dir=x"], ["without effect in a single run"]),
        (["sweep=search"], ["sweep: without effect in a single run", "add -m"]),
        (["launcher.slots=2"], ["launcher.slots: without effect in a single run"]),
    ],
)
def test_single_mistakes_name_the_way_out(words: list[str], parts: list[str]) -> None:
    text = refusal(*words)
    for part in parts:
        assert part in text


VALUES = [
    *("", "null", "true", "-1", "1e400", "nan", "[]", "[a,b]", "{a:{b:1}}", "a,b", "range(1,3)", "interval(0,1)"),
    *("glob(*)", "${method}", "${x}", "${", "'???'", "'", "a=b", "文", "[[1]]", "stage3", "str([1])", "~", "\\"),
]
ODD_KEYS = (
    "hydra.searchpath",
    "hydra.sweeper.params",
    "hydra",
    "hydra/launcher",
    "method@x",
    "a..b",
    "",
    "eval",
    "run",
)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_typed_is_a_run_or_a_refusal_and_never_a_traceback(seed: int) -> None:
    dice = random.Random(seed)
    names = [*keys(), *ODD_KEYS, *shipped_options()]
    words = [f"{dice.choice(['', '', '+', '++', '~'])}{dice.choice(names)}={dice.choice(VALUES)}" for _ in range(2)]
    if seed % 3 == 0:
        words.insert(0, "-m")
    with contextlib.suppress(ConfigError):
        asked(*words)


def test_what_ends_composing_early_does_not_hide_what_was_found_before() -> None:
    text = refusal("zero=stage9", "method@x=lora", "optim.lr")
    assert "zero has no option 'stage9'" in text
    assert "optim.lr: is no override" in text
    assert "Could not override 'method@x'" in text


def test_an_echo_of_a_wrong_value_is_reported_once() -> None:
    assert refusal("method.lr=x").startswith("config error:"), "optim.lr only repeats method.lr"


def test_warnings_name_what_will_not_run(rows: str) -> None:
    (warning,) = asked(rows).warnings
    assert warning.startswith("eval: no held-out rows, so loss, generate will not run")
    assert asked("train.epochs=2", "train.max_steps=9").warnings == [
        "train.epochs: without effect, train.max_steps=9 decides"
    ]
    assert asked("train.epochs=null", "train.max_steps=9").warnings == []
    assert (
        "train.max_steps: without effect under entry=evaluate" in asked("entry=evaluate", "train.max_steps=3").warnings
    )


def test_keys_of_fetching_say_what_is_left_of_them_where_blocks_are_one_piece() -> None:
    (warning,) = asked(
        "zero=stage3", "zero.stage3_max_live_parameters=9", "zero.stage3_max_reuse_distance=null"
    ).warnings
    assert warning.startswith("zero.stage3_max_live_parameters: read for what lies outside of blocks")
    for plain in ("zero.whole_blocks=false", "offload=all"):
        assert asked("zero=stage3", "zero.stage3_max_live_parameters=9", plain).warnings == []
    assert asked("zero=stage3").warnings == []


def test_a_bucket_that_deepspeed_takes_and_does_not_use_is_told() -> None:
    (warning,) = asked("zero=stage2", "zero.allgather_bucket_size=2e6").warnings
    assert warning.startswith("zero.allgather_bucket_size: without effect: DeepSpeed gathers")
    assert asked("zero=stage2", "zero.reduce_bucket_size=2e6").warnings == []


def test_a_list_of_texts_needs_no_quotes_for_signs_that_mean_nothing_to_hydra() -> None:
    model = config("model=tiny_qwen2", "model.add_tokens=[<甲>, <b&c>]").model
    assert model.add_tokens == ["<甲>", "<b&c>"]
    text = refusal("model=tiny_qwen2", "model.add_tokens=[<a>,'b']")
    assert "-> put quotes inside of the shell's: \"model.add_tokens=['<a>','b']\"" in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("entry=infer", "entry=generate"),
        ("entry=estimate", "entry=plan"),
        ("model=qwen2-7b-instruct", "model=qwen2"),
        ("method=prefix_tuning", "method=ptuning"),
        ("offload=true", "offload=optimizer"),
        ("launcher=torchrun", "launcher=env"),
        ("eval=[loss,bleu]", "eval=rouge"),
        ("deepspeed=ds.json", "deepspeed.config_file=ds.json"),
    ],
)
def test_an_option_by_its_name_elsewhere_is_not_taken_for_the_one_that_is_spelt_alike(given: str, meant: str) -> None:
    assert f"did you mean {meant}? options: " in refusal(given)


def test_names_elsewhere_are_no_options_here_and_lead_to_ones_that_are() -> None:
    for group, words in OPTIONS_ELSEWHERE.items():
        assert set(words.values()) <= set(shipped_options()[group])
        assert not set(words) & set(shipped_options()[group])
