"""Each role says what it takes: argument_specs, defaults, what it uses and its README are one and the same."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import generate
from tests.unit.loading import ROOT

ROLES = sorted(file.parents[1] for file in ROOT.glob("roles/*/tasks/main.yml"))
PARTS = ("tasks", "handlers", "templates", "vars", "files")

each_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)


def options(role: Path, entry: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the options of an entry point, or of all."""
    specs = generate.specs(role)
    chosen = [specs[entry]] if entry else list(specs.values())
    return {name: option for spec in chosen for name, option in (spec.get("options") or {}).items()}


def sources(role: Path) -> dict[Path, str]:
    """Return the files in which a role uses its variables."""
    files = [file for part in PARTS for file in sorted((role / part).rglob("*"))]
    return {file: file.read_text() for file in files if file.suffix in {".yml", ".j2"}}


def tasks(role: Path) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a role, those inside blocks too."""
    waiting = [
        task
        for part in ("tasks", "handlers")
        for file in sorted((role / part).glob("*.yml"))
        for task in yaml.safe_load(file.read_text()) or []
    ]
    while waiting:
        task = waiting.pop(0)
        waiting += [inner for key in ("block", "rescue", "always") for inner in task.get(key, [])]
        yield task


def test_there_are_roles() -> None:
    assert {"gpu_devices", "lxc_container"} <= {role.name for role in ROLES}


@each_role
def test_defaults_and_argument_specs_are_equal(role: Path) -> None:
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    described = options(role, "main")
    assert {name: option["default"] for name, option in described.items() if "default" in option} == defaults
    without = {name for name, option in described.items() if "default" not in option}
    assert without == {name for name, option in described.items() if option.get("required")}


@each_role
def test_every_option_is_typed_and_described(role: Path) -> None:
    def lacking(described: dict[str, dict[str, Any]], parent: str = "") -> Iterator[str]:
        for name, option in described.items():
            if not {"type", "description"} <= option.keys() or (option["type"] == "list" and "elements" not in option):
                yield f"{parent}{name}"
            yield from lacking(option.get("options", {}), f"{parent}{name}.")

    assert list(lacking(options(role))) == []
    assert [name for name in options(role) if not name.startswith(f"{role.name}_")] == []


@each_role
def test_every_variable_is_used(role: Path) -> None:
    text = "\n".join(sources(role).values())
    assert [name for name in options(role) if not re.search(rf"\b{name}\b", text)] == []


@each_role
def test_no_variable_is_used_that_no_role_has(role: Path) -> None:
    known = {name for other in ROLES for name in options(other)}
    modules = {file.stem for other in ROLES for file in (other / "library").glob("*.py")}
    prefixes = "|".join(other.name for other in ROLES)
    used = {
        (file.name, name)
        for file, text in sources(role).items()
        for name in re.findall(rf"(?<![\w/.-])((?:{prefixes})_\w+)(?![\w-]*[/.])", text)
    }
    assert {(file, name) for file, name in used if name not in known | modules} == set()


@each_role
def test_private_variables_are_marked(role: Path) -> None:
    names = [task["register"] for task in tasks(role) if "register" in task]
    names += [name for task in tasks(role) for name in task.get("vars", {})]
    names += [name for task in tasks(role) for name in task.get("ansible.builtin.set_fact", {}) if name != "cacheable"]
    for file in (role / "vars").glob("*.yml"):
        names += list(yaml.safe_load(file.read_text()) or {})
    assert [name for name in names if not name.startswith(f"__{role.name}_")] == []


@each_role
def test_meta_names_the_role(role: Path) -> None:
    meta = yaml.safe_load((role / "meta/main.yml").read_text())
    assert meta["galaxy_info"]["role_name"] == role.name
    assert meta["dependencies"] == []


@each_role
def test_main_is_a_table_of_tagged_phases(role: Path) -> None:
    main = yaml.safe_load((role / "tasks/main.yml").read_text())
    phases = {"preflight", "install", "configure", "run", "verify"}
    for task in main:
        assert {"ansible.builtin.import_tasks", "ansible.builtin.include_tasks"} & task.keys(), task["name"]
        assert role.name in task["tags"], task["name"]
        assert phases & set(task["tags"]), task["name"]


@each_role
def test_role_has_a_molecule_scenario(role: Path) -> None:
    assert (ROOT / "molecule" / role.name / "molecule.yml").is_file()


def test_generated_pages_are_current() -> None:
    pages = generate.pages()
    assert [str(path.relative_to(ROOT)) for path, text in pages.items() if path.read_text() != text] == []


@pytest.mark.parametrize(
    ("description", "markdown"),
    [
        ("Set V(absent) in O(role_state).", "Set `absent` in `role_state`."),
        ("C(a(b)) and B(no) tags (C) in NVIDIA(R).", "`a(b)` and **no** tags (C) in NVIDIA(R)."),
        (["One.", "Two."], "One.\n\nTwo."),
    ],
)
def test_markup_becomes_markdown(description: str | list[str], markdown: str) -> None:
    assert generate.markdown(description) == markdown


def test_a_table_shows_keys_inside_a_variable() -> None:
    inner = {"path": {"type": "path", "required": True, "description": "Where | what."}}
    shown: dict[str, dict[str, Any]] = {
        "role_nodes": {"type": "list", "elements": "dict", "default": [], "description": "Nodes.", "options": inner},
        "role_state": {"type": "str", "choices": ["a", "b"], "default": "a", "description": "State."},
        "role_rest": {"type": "dict", "default": {"x": [], "y": ""}, "description": "Rest."},
    }
    assert generate.table(shown).splitlines()[2:] == [
        "| `role_nodes` | list of dict | `[]` | Nodes. |",
        "| `role_nodes[].path` | path | required | Where \\| what. |",
        "| `role_state` | `a` or `b` | `a` | State. |",
        "| `role_rest` | dict | `{x: [], y: ''}` | Rest. |",
    ]
