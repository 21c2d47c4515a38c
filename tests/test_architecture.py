"""ARCHITECTURE.md names every file of the package: a newcomer must be able to find a room by it."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_module_has_its_place_in_the_tree() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    modules = [path for path in (ROOT / "glmexp").glob("*/*.py") if path.name != "__init__.py"]
    assert len(modules) > 50
    assert [str(path.relative_to(ROOT)) for path in modules if path.name not in text] == []


def test_no_module_is_too_long_to_be_one_room() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "glmexp").rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert long == {}
