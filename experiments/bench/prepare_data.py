"""Preparing training data: this project beside datasets.map, with the same tokenizer, template and rows, caches cold.

    python experiments/bench/prepare_data.py --tokenizer FOLDER [--rows 500000] [--processes 2] [--repeats 1]
        [--ways glmexp map] [--record FILE] [--profile FILE]

FOLDER holds ChatGLM3-6B's tokenizer.model. Each way runs in a process of its own, one after the other, in turns:

- glmexp: glmexp.data.prepare from the JSON lines file to memory maps
- map: datasets.load_dataset("json") and .map(batched=True, num_proc=...) with the tokenizer's own methods, as the
  release uses them (build_single_message); the result is Arrow on disk
- map, fast encode: the same with this project's renderer inside, which leaves transformers' bookkeeping out

Each way's line is printed, and added to --record, as soon as it has ended. --profile: where the time of glmexp goes in
one process (cProfile), in place of the comparison.

Printed: seconds from the file to prepared data, rows/s, and the peak over time of the memory of all processes together
(proportional set size, so that shared pages count once) and of resident sizes added up. Expected: glmexp at least 1.5
times as fast as map, at most 1.5 GB. Timings of a busy machine are upper bounds; compare ways of the same call only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ZH = """
今天 天气 我们 公园 请 把 下面 的 句子 翻译 成 英文 数据 模型 训练 速度 很 快 因为 所以 学校 老师 学生 写
一个 关于 春天 故事 河流 山 海 计算 结果 是 多少 解释 为什么 月亮 地球 太阳
"""
EN = """
write a short story about the river and explain why data model training speed is fast because
students like numbers results compute answer question city mountain
"""


def make_rows(path: Path, rows: int) -> None:
    """Synthetic alpaca rows: two thirds Chinese; characters: instruction 30, input 40, output 150."""
    chance = random.Random(0)
    words_zh, words_en = ZH.split(), EN.split()

    def text(characters: int, chinese: bool) -> str:
        words: list[str] = []
        length = 0
        while length < characters:
            word = chance.choice(words_zh if chinese else words_en)
            words.append(word)
            length += len(word) + (not chinese)
        return ("" if chinese else " ").join(words) + ("。" if chinese else ".")

    with path.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            chinese = number % 3 != 0
            row = {
                "instruction": f"{number} {text(chance.randint(15, 45), chinese)}",
                "input": text(chance.randint(20, 60), chinese) if number % 2 else "",
                "output": text(chance.randint(50, 250), chinese),
            }
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def tokenizer_of(folder: str) -> Any:
    from glmexp.model import ChatGLM3Tokenizer

    return ChatGLM3Tokenizer(str(Path(folder) / "tokenizer.model"))


def with_glmexp(file: str, folder: str, work: str, processes: int) -> dict[str, Any]:
    from glmexp.config.data_schema import Columns, DataSection
    from glmexp.data.prepare import prepare
    from glmexp.model.renderer import renderer

    columns = Columns(None, None, None, None, None, None, None)
    section = DataSection(
        name="bench", train_file=file, eval_file=None, holdout=None, format="alpaca", columns=columns, encoding=None,
        on_error="error", max_length=1024, supervise="last", packing=False, shuffle=True, group_by_length=False,
        num_workers=0, prefetch=1, prepare_workers=processes, cache_dir=f"{work}/prepared",
    )  # fmt: skip
    template = renderer("chatglm3", tokenizer_of(folder))
    started = time.perf_counter()
    prepared = prepare(section, 0, template)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "examples": len(prepared.train), "tokens": int(prepared.train.lengths.sum())}


def with_map(file: str, folder: str, work: str, processes: int, fast: bool) -> dict[str, Any]:
    import datasets

    from glmexp.model.renderer import renderer

    tokenizer = tokenizer_of(folder)
    template = renderer("chatglm3", tokenizer)
    datasets.disable_progress_bars()

    def question(instruction: str, material: str) -> str:
        return f"{instruction}\n{material}" if material.strip() else instruction

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        for instruction, material, output in zip(batch["instruction"], batch["input"], batch["output"], strict=True):
            asked = question(instruction, material)
            if fast:
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
                ids, learned = template.train(turns)
                labels = [index if flag else -100 for index, flag in zip(ids, learned, strict=True)]
            else:
                prompt = [*tokenizer.get_prefix_tokens(), *tokenizer.build_single_message("user", "", asked)]
                answer = [*tokenizer.build_single_message("assistant", "", output), tokenizer.eos_token_id]
                ids = (prompt + answer)[:1024]
                labels = ([-100] * (len(prompt) + 1) + answer[1:])[:1024]
            rows["input_ids"].append(ids)
            rows["labels"].append(labels)
        return rows

    started = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=file, split="train", cache_dir=f"{work}/datasets")
    middle = time.perf_counter()
    mapped = loaded.map(encode, batched=True, num_proc=processes, remove_columns=loaded.column_names)
    seconds = time.perf_counter() - started
    import pyarrow.compute

    counts = pyarrow.compute.list_value_length
    lengths = sum(pyarrow.compute.sum(counts(part)).as_py() for part in mapped.data["input_ids"].chunks)
    return {"seconds": seconds, "map_alone_s": seconds - (middle - started), "examples": len(mapped), "tokens": lengths}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for: on a busy machine this is steadier than the clock."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


WAYS = {
    "glmexp": with_glmexp,
    "map": lambda *given: with_map(*given, fast=False),
    "map, fast encode": lambda *given: with_map(*given, fast=True),
}


def measured(way: str, file: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one way in a fresh process with empty caches, watching the memory of all its processes."""
    work = tempfile.mkdtemp(prefix="prepare-bench-", dir=file.parent)
    command = [sys.executable, __file__, "--tokenizer", arguments.tokenizer, "--processes", str(arguments.processes)]
    output = Path(work) / "output.txt"  # no pipe, which could fill up while only the memory is watched
    with output.open("w") as stream:
        child = subprocess.Popen([*command, "--way", way, "--file", str(file), "--work", work], stdout=stream)
    peak_pss = peak_rss = 0
    root = psutil.Process(child.pid)
    while child.poll() is None:
        pss = rss = 0
        for process in [root, *_children(root)]:
            try:
                memory = process.memory_full_info()
            except psutil.Error:
                continue
            pss += memory.pss
            rss += memory.rss
        peak_pss, peak_rss = max(peak_pss, pss), max(peak_rss, rss)
        time.sleep(0.25)
    lines = output.read_text().splitlines()
    shutil.rmtree(work)
    if child.returncode != 0 or not lines:
        return {"way": way, "failed_with_exit_code": child.returncode}
    result = json.loads(lines[-1])
    return {
        "way": way,
        "rows": arguments.rows,
        "processes": arguments.processes,
        **result,
        "rows_per_s": arguments.rows / result["seconds"],
        "peak_pss_bytes": peak_pss,
        "peak_rss_sum_bytes": peak_rss,
        "load_average": os.getloadavg()[0],
    }


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def profiled(file: Path, arguments: argparse.Namespace) -> None:
    """Prepare in this process alone under cProfile; the 25 functions that take most time themselves."""
    import cProfile
    import pstats

    import glmexp.data.prepare  # noqa: F401 - what is imported is not what is measured
    from glmexp.data import workers

    tokenizer_of(arguments.tokenizer)
    workers.LARGE_BYTES = sys.maxsize
    watch = cProfile.Profile()
    watch.enable()
    with_glmexp(str(file), arguments.tokenizer, str(file.parent), 1)
    watch.disable()
    with Path(arguments.profile).open("w") as stream:
        pstats.Stats(watch, stream=stream).sort_stats("tottime").print_stats(25)
    print(Path(arguments.profile).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--record", help="a JSON lines file that each result is added to")
    parser.add_argument("--profile", metavar="FILE", help="profile glmexp instead")
    parser.add_argument("--way", help="(internal) run one way in this process")
    parser.add_argument("--file", help="(internal)")
    parser.add_argument("--work", help="(internal)")
    arguments = parser.parse_args()
    if arguments.way is not None:
        before = cpu_seconds()
        result = WAYS[arguments.way](arguments.file, arguments.tokenizer, arguments.work, arguments.processes)
        print(json.dumps({**result, "cpu_s_with_imports": cpu_seconds() - before}))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        make_rows(file, arguments.rows)
        print(f"{arguments.rows} rows, {file.stat().st_size / 1e6:.0f} MB, {arguments.processes} processes", flush=True)
        if arguments.profile:
            profiled(file, arguments)
            return
        found: dict[str, list[float]] = {}
        for _ in range(arguments.repeats):
            for way in arguments.ways:
                result = measured(way, file, arguments)
                line = json.dumps(result)
                print(line, flush=True)
                if arguments.record:
                    with Path(arguments.record).open("a") as stream:
                        stream.write(line + "\n")
                if "seconds" in result:
                    found.setdefault(way, []).append(result["seconds"])
        for way, seconds in found.items():
            if way != "glmexp" and "glmexp" in found:
                ratio = min(seconds) / min(found["glmexp"])
                print(f"glmexp is {ratio:.2f} times as fast as {way} (best of {len(seconds)} each)", flush=True)


if __name__ == "__main__":
    main()
