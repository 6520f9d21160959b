"""The package's rooms, and which rooms each of them may import (docs/architecture.md draws it).

The test reads the source, so imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import rooms_picture
from rooms import FLOORS, ROOMS, ROUTER, ways_back

import kv_connector

PACKAGE = Path(kv_connector.__file__).parent

NATIVE = {"_native", "_bench"}
FRAMEWORKS = {"vllm", "sglang", "ray", "verl", "torch"}
ADAPTERS = {"vllm", "sglang", "ray", "verl"}
OF_TENSORS = {"weights": {"torch"}, "moe": {"torch"}}
# A connector that vLLM loads for a comparison, and a process that measures torch's collectives.
WITH_FRAMEWORKS = ("bench/pd/mooncake_cpu.py", "bench/moe_rank.py")
MOST_MODULES = 15
"""Most modules of a folder, so that its list is read at a glance."""


def imported(room: str) -> Iterator[tuple[str, str]]:
    """Yields (where, module) for each import in the room, which is a folder or a module."""
    folder = PACKAGE / room
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: imports name the package"
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for module in modules:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", module


def test_nothing_lies_about_outside_of_the_rooms() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py"}


def test_the_picture_of_the_documents_shows_the_tables() -> None:
    for path, drawn in rooms_picture.pictures().items():
        assert path.read_text() == drawn


def test_the_table_has_no_way_back() -> None:
    assert ways_back(ROOMS, NATIVE) == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_arrows_lead_to(room: str) -> None:
    wrong = [
        f"{where} imports {module}"
        for where, module in imported(room)
        if module.startswith("kv_connector.")
        and module.split(".")[1] not in {room, *ROOMS[room], "__version__"}
    ]
    assert not wrong


def test_the_router_consists_of_its_rooms() -> None:
    names = {path.stem for path in (PACKAGE / "router").iterdir() if path.name != "__pycache__"}
    assert names == {"__init__", *ROUTER}


def test_the_table_of_the_router_has_no_way_back() -> None:
    assert ways_back(ROUTER) == {}


def test_a_way_back_in_a_table_is_found() -> None:
    assert ways_back({"low": {"high"}, "high": {"low"}}) == {"low": {"high"}}


@pytest.mark.parametrize("room", ROUTER)
def test_a_room_of_the_router_imports_only_what_its_arrows_lead_to(room: str) -> None:
    modules = [(where, module.split(".")) for where, module in imported(f"router/{room}")]
    wrong = [
        f"{where} imports {'.'.join(names)}"
        for where, names in modules
        if names[:2] == ["kv_connector", "router"] and names[2] not in {room, *ROUTER[room]}
    ]
    assert not wrong


@pytest.mark.parametrize("room", FLOORS)
def test_the_floors_of_a_room_name_each_of_its_parts_once(room: str) -> None:
    listed = [part for floor in FLOORS[room] for part in floor]
    found = {path.stem for path in (PACKAGE / room).iterdir() if path.name != "__pycache__"}
    assert sorted(listed) == sorted(found - {"__init__"})


@pytest.mark.parametrize("room", FLOORS)
def test_a_part_of_a_room_imports_only_parts_of_lower_floors(room: str) -> None:
    below: set[str] = set()
    wrong = []
    for floor in FLOORS[room]:
        for part in floor:
            wrong += [
                f"{where} imports {module}"
                for where, module in imported(f"{room}/{part}")
                if module.startswith(f"kv_connector.{room}.") and module.split(".")[2] not in {part, *below}
            ]
        below |= set(floor)
    assert wrong == []


def test_a_folder_has_at_most_fifteen_modules() -> None:
    modules = Counter(
        path.parent.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert [folder for folder, count in modules.items() if count > MOST_MODULES] == []


@pytest.mark.parametrize(
    "path",
    sorted(path for room in FLOORS for path in (PACKAGE / room).rglob("__init__.py")),
    ids=lambda path: path.parent.relative_to(PACKAGE).as_posix(),
)
def test_a_folder_of_a_room_with_floors_hands_on_nothing(path: Path) -> None:
    (docstring,) = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "router").rglob("__init__.py")), ids=lambda p: p.parent.name
)
def test_each_router_package_has_only_a_one_line_docstring(path: Path) -> None:
    (docstring,) = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    assert docstring.lineno == docstring.end_lineno


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - ADAPTERS))
def test_frameworks_are_imported_by_their_adapters_alone(room: str) -> None:
    wrong = [
        f"{where} imports {module}"
        for where, module in imported(room)
        if module.split(".")[0] in FRAMEWORKS - OF_TENSORS.get(room, set())
        and not where.startswith(WITH_FRAMEWORKS)
    ]
    assert not wrong


def test_only_the_vllm_plugin_names_its_weights() -> None:
    """vllm/weights imports the rest of vllm. plugin.py names it as a string, and vLLM imports it."""
    weights = "kv_connector.vllm.weights"
    wrong = [
        f"{where} imports {module}"
        for where, module in imported("vllm")
        if f"{module}.".startswith(f"{weights}.") and not where.startswith("vllm/weights/")
    ]
    assert not wrong
    naming = {path.name for path in (PACKAGE / "vllm").glob("*.py") if weights in path.read_text()}
    assert naming == {"plugin.py"}


def test_vllm_is_imported_by_four_modules() -> None:
    """internals.py has the imports of all other modules. plugin.py and forced_token.py also run in a vLLM
    that this package does not support, which internals.py refuses."""
    importing = {where.split(":")[0] for where, module in imported("vllm") if module.split(".")[0] == "vllm"}
    assert importing == {
        "vllm/internals.py",
        "vllm/plugin.py",
        "vllm/forced_token.py",
        "vllm/encoder/internals.py",
    }


def test_each_patch_of_vllm_documents_its_target_reason_and_end() -> None:
    tree = ast.parse((PACKAGE / "vllm" / "patches.py").read_text())
    patches = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert patches
    for patch in patches:
        text = ast.get_docstring(patch) or ""
        fields = [line.split(":")[0] for line in text.splitlines()]
        found = [field for field in fields if field in ("Replaces", "Why", "Until")]
        assert found == ["Replaces", "Why", "Until"], patch.name


def test_the_protocol_needs_nothing_of_the_outer_world() -> None:
    """The protocol imports no package but msgspec, and no module of the standard library that acts."""
    acting = {"asyncio", "os", "select", "socket", "subprocess", "threading", "time"}
    for where, module in imported("protocol"):
        top = module.split(".")[0]
        assert top in {"kv_connector", "msgspec"} or top in sys.stdlib_module_names - acting, (
            f"{where} imports {module}"
        )


def test_the_simulator_needs_no_sockets_no_numpy_and_no_native_module() -> None:
    """A campaign runs on a big machine that has only Python and msgspec."""
    absent = "zmq", "numpy", "kv_connector._native"
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import tests.simulation.campaign"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
