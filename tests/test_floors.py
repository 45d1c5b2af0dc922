"""A room imports only from floors below its own (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "bmoe"
FLOORS = [
    {"recipe", "errors", "files"},
    {"kernels", "precision"},
    {"model", "parallel", "data"},
    {"training", "evaluation", "profiling", "reports", "interop"},
    {"console"},
    {"jobs"},
    {"cli"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem != "__init__")


def imported_rooms(path: Path) -> set[str]:
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "bmoe" else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("bmoe.")}
    return rooms & FLOOR_OF.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_only_from_below(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in FLOOR_OF, f"{room} has no floor"
    for other in imported_rooms(path) - {room, "errors"}:
        assert room != "recipe", "recipe.py imports nothing of bmoe"
        assert FLOOR_OF[other] < FLOOR_OF[room], f"{path} imports bmoe.{other} from a floor that is not below"
