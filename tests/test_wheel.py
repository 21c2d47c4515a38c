"""What is built from this tree is whole: installed elsewhere, it composes, inspects and brings its types along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from glmexp.config.nearest import conf_folder
from tests.cli import environment

ROOT = Path(__file__).parents[1]
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
out = sys.argv[1]
source = build_meta.build_sdist(out)
with tarfile.open(f"{out}/{source}") as archive:
    archive.extractall(out, filter="data")
os.chdir(f"{out}/{source.removesuffix('.tar.gz')}")
print(build_meta.build_wheel(out))
"""


def run(*words: str, folder: Path, path: Path | None = None) -> str:
    """Standard output of a command in ``folder``, with ``path`` as the only place beside the installed packages."""
    more = {"PYTHONPATH": str(path)} if path else {}
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"} | more
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a source distribution, built from a copy of the tree: links must survive both."""
    base = tmp_path_factory.mktemp("wheel")
    tree, out = base / "tree", base / "out"
    ignore = shutil.ignore_patterns("__pycache__", "results", "*.egg-info")
    for name in ("glmexp", "conf", "experiments"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    out.mkdir()
    run(sys.executable, "-c", BUILD, str(out), folder=tree)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    words = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(target))
    run(sys.executable, *words, str(wheel), folder=target)
    return target


def test_wheel_has_every_file_that_is_not_code(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"glmexp/conf/{path.relative_to(conf_folder())}" for path in conf_folder().glob("**/*.yaml")}
    conf |= {f"glmexp/conf/experiments/{path.name}" for path in (ROOT / "experiments").glob("*.yaml")}
    package = ROOT / "glmexp"
    files = [
        path.relative_to(package) for path in package.glob("**/*.*") if path.is_file() and "conf" not in path.parts
    ]
    shipped = {f"glmexp/{path}" for path in files if "__pycache__" not in path.parts}
    assert len(conf) > 60
    assert len(shipped) > 150
    assert sorted((conf | shipped) - names) == []
    assert not [
        name for name in names if name.split("/")[0] not in ("glmexp", wheel.name.partition("-py3")[0] + ".dist-info")
    ]


def test_an_installed_wheel_works_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run(sys.executable, "-c", "import glmexp; print(glmexp.__file__)", folder=tmp_path, path=installed)
    assert Path(where.strip()).is_relative_to(installed), "the wheel is meant, not this checkout"
    python = (sys.executable, "-m", "glmexp")
    assert "rank_and_bucket" in run(*python, "--help", folder=tmp_path, path=installed), "studies are there"
    tree = run(
        *python,
        "--cfg",
        "job",
        "--resolve",
        "zero=stage3",
        "model=qwen2",
        "train.max_steps=3",
        folder=tmp_path,
        path=installed,
    )
    assert "stage: 3" in tree
    assert "max_steps: 3" in tree
    assert list(tmp_path.iterdir()) == []
    shown = run(*python, "entry=inspect", "inspect.rows=1", "data.cache_dir=null", folder=tmp_path, path=installed)
    assert "builtin:demo" in shown or "train.jsonl" in shown, shown


def test_an_installed_wheel_brings_its_types(installed: Path, tmp_path: Path) -> None:
    """A type checker of somebody else's project sees the fields of a configuration."""
    (tmp_path / "mine.py").write_text(
        "from glmexp.config.errors import Problem\n\nreveal_type(Problem('a', 'b').where)\n", encoding="utf-8"
    )
    words = ("-m", "mypy", "--no-incremental", "--python-executable", sys.executable, "mine.py")
    env = {**os.environ, "MYPYPATH": "", "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert 'Revealed type is "str"' in done.stdout.replace("builtins.", ""), done.stdout + done.stderr
