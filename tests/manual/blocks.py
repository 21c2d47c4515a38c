"""The code of the manual's pages: every fenced block with what its fence asks for, and every command in the text.

    ```bash              composed: each command of glmexp goes through every check, nothing is started
    ```bash gpu=4        the same on a machine with 4 GPUs, and trainings are planned: bytes of each phase
    ```bash gpu=4 memory=24GB    and the plan must fit into such GPUs
    ```bash run          run by a shell, in the order of the pages, in one folder that all pages share
    ```bash skip: WHY    not executed; WHY stands in docs/README.md
    ```yaml file=PATH    written to PATH of that folder (yaml, json, python)
    ```python run        run by Python there

``python -m tests.manual.blocks`` writes what is generated: the list of what is skipped into docs/README.md, the code of
each English page into the Chinese one, block by block in the page's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ("bash", "sh", "shell", "console")
CODE = (*SHELL, "python", "yaml", "json", "jsonl")
COMMANDS = ("python -m glmexp", "torchrun ", "deepspeed ", "accelerate ", "srun ", "mpirun ")
BEGIN, END = "<!-- skipped blocks: written by python -m tests.manual.blocks -->", "<!-- end -->"


@dataclass(frozen=True)
class Block:
    """A piece of code on a page."""

    page: str
    """From the top of the checkout, such as docs/data.md."""
    line: int
    language: str
    words: tuple[str, ...]
    """What the fence asks for: run, gpu=4, file=PATH, skip: WHY."""
    text: str
    fenced: bool = True

    @property
    def place(self) -> str:
        """``docs/data.md:12``."""
        return f"{self.page}:{self.line}"

    @property
    def skipped(self) -> str | None:
        """Why it is not executed."""
        words = " ".join(self.words)
        return words.removeprefix("skip:").strip() if words.startswith("skip:") else None

    def asked(self, name: str) -> str | None:
        """The value of ``name=VALUE`` in the fence."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), None)


def pages() -> list[Path]:
    """README first, then the quick start, then all others; the Chinese pages come after what they repeat."""
    docs = sorted((ROOT / "docs").glob("*.md"), key=lambda path: (path.name != "quickstart.md", path.name))
    return [ROOT / "README.md", *docs, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/zh").glob("*.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, and indented ones that begin with a command."""
    page = str(path.relative_to(ROOT))
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r" {0,3}(`{3,})\s*(\S*)\s*(.*)$", lines[number])
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[1])
            text = "\n".join(lines[number + 1 : end])
            yield Block(page, number + 1, fence[2], tuple(fence[3].split()), text)
            number = end
        elif lines[number].startswith("    ") and lines[number].strip().startswith(COMMANDS):
            end = number
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            text = "\n".join(line[4:] for line in lines[number:end])
            yield Block(page, number + 1, "bash", (), text, fenced=False)
            number = end
        number += 1


def spans(path: Path) -> Iterator[Block]:
    """Commands of glmexp in the text and in tables, between single backticks."""
    page, inside = str(path.relative_to(ROOT)), False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        inside ^= line.lstrip().startswith("```")
        for text in () if inside else re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            if text.startswith(("python -m glmexp ", "python -m glmexp.compare ")) and "..." not in text:
                yield Block(page, number, "bash", (), text.replace("\\|", "|"), fenced=False)


def skipped() -> str:
    """A table of what is not executed, English pages only: the Chinese ones have the same blocks."""
    rows = [
        f"| [{one.page.removeprefix('docs/')}]({'../' if '/' not in one.page else ''}{one.page.removeprefix('docs/')}) "
        f"| `{_first(one.text)}` | {one.skipped} |"
        for path in pages()
        if "zh" not in path.parts
        for one in blocks(path)
        if one.skipped is not None
    ]
    return "\n".join(["| page | block that begins with | why |", "| --- | --- | --- |", *rows])


def _first(text: str) -> str:
    line = next(line for line in text.splitlines() if line.strip() and not line.startswith("#")).rstrip(" \\")
    return line.replace("|", "\\|")


def with_skipped(page: str) -> str:
    """The page with the list between its two marks renewed."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{skipped()}\n{END}{rest.partition(END)[2]}"


def with_code_of(chinese: str, english: Path) -> str:
    """The Chinese page with the code of the English one in its fences, one after another."""
    code = iter(block for block in blocks(english) if block.language in CODE)

    def renewed(fence: re.Match[str]) -> str:
        if fence[1].split()[0] not in CODE:
            return fence[0]
        block = next(code, None)
        assert block is not None, f"the Chinese {english.name} has a block more than the English one"
        return f"```{' '.join([block.language, *block.words])}\n{block.text}\n```\n"

    return re.sub(r"^```(\S.*)\n(?:.*\n)*?```\n", renewed, chinese, flags=re.M)


def write() -> None:
    """Renew what is generated."""
    index = ROOT / "docs/README.md"
    index.write_text(with_skipped(index.read_text(encoding="utf-8")), encoding="utf-8")
    for page in sorted((ROOT / "docs/zh").glob("*.md")):
        renewed = with_code_of(page.read_text(encoding="utf-8"), ROOT / "docs" / page.name)
        page.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    write()
