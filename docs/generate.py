"""Write the tables of variables: `python -m docs.generate`; with --check say which are out of date.

Each role's README.md comes from its meta/argument_specs.yml, docs/variables.md from all of them and from the variables
that the plays themselves read.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.unit.loading import load

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- Made by `python -m docs.generate`; change meta/argument_specs.yml instead. -->"
CODE = re.compile(r"\b[COPV]\(((?:[^()]|\([^()]*\))*)\)")
BOLD = re.compile(r"\b[BI]\(([^()]*)\)")

Options = Mapping[str, Mapping[str, Any]]


def markdown(description: str | list[str]) -> str:
    """Return a description of argument_specs, which uses Ansible's markup, as Markdown."""
    text = description if isinstance(description, str) else "\n\n".join(description)
    return BOLD.sub(r"**\1**", CODE.sub(r"`\1`", text.strip()))


def value(default: Any) -> str:
    """Return a default as a table shows it: YAML in one line."""
    text = yaml.safe_dump(default, default_flow_style=True, width=10**6, sort_keys=False)
    return "`" + text.replace("...\n", "").strip() + "`"


def kind(option: Mapping[str, Any]) -> str:
    """Return an option's type in words, such as `list of path`."""
    name = option.get("type", "str")
    if "choices" in option:
        return " or ".join(f"`{choice}`" for choice in option["choices"])
    return f"{name} of {option['elements']}" if "elements" in option else str(name)


def rows(options: Options, parent: str = "") -> Iterator[str]:
    """Return a row for each option, each followed by the keys inside it."""
    for name, option in options.items():
        default = "required" if option.get("required") else value(option["default"]) if "default" in option else ""
        cells = (f"`{parent}{name}`", kind(option), default, " ".join(markdown(option["description"]).split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        if "options" in option:
            inner = "[]." if option.get("type") == "list" else "."
            yield from rows(option["options"], f"{parent}{name}{inner}")


def table(options: Options) -> str:
    """Return the table of some variables."""
    head = "| Variable | Type | Default | Meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"{row}\n" for row in rows(options))


def specs(role: Path) -> dict[str, Any]:
    """Return a role's argument_specs by entry point."""
    loaded: dict[str, Any] = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    return loaded


def tags(role: Path) -> list[str]:
    """Return the phases of a role, by the tags of its main tasks."""
    tasks = yaml.safe_load((role / "tasks/main.yml").read_text())
    return list(dict.fromkeys(tag for task in tasks for tag in task.get("tags", []) if tag != role.name))


def readme(role: Path) -> str:
    """Return a role's README."""
    parts = [f"# {role.name}", MARK]
    for entry, spec in specs(role).items():
        parts += [] if entry == "main" else [f"## Tasks from {entry}"]
        parts += [markdown(spec["short_description"]) + ".", markdown(spec.get("description", ""))]
        parts += [table(spec["options"]).strip()] if spec.get("options") else []
    parts.append("Phases, as tags beside the role's own name: " + ", ".join(f"`{tag}`" for tag in tags(role)) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def index(roles: list[Path]) -> str:
    """Return the page with every variable of the project."""
    fleet = load("plugins/action/check_inventory.py").FLEET_OPTIONS
    found = {name: role for role in roles for spec in specs(role).values() for name in spec.get("options") or {}}
    lines = [f"| `{name}` | [{role.name}](../roles/{role.name}/README.md) |" for name, role in sorted(found.items())]
    return (
        "\n\n".join(
            [
                "# Variables",
                MARK.replace("meta/argument_specs.yml", "a role's meta/argument_specs.yml"),
                "The plays read these:",
                table(fleet).strip(),
                "The roles read these; a name that begins with a role's name and is not here is refused.",
                "\n".join(["| Variable | Role |", "| --- | --- |", *lines]),
            ]
        )
        + "\n"
    )


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Return every generated page with its text."""
    roles = sorted(file.parents[1] for file in root.glob("roles/*/meta/argument_specs.yml"))
    return {role / "README.md": readme(role) for role in roles} | {root / "docs/variables.md": index(roles)}


def main() -> None:
    """Write the pages, or with --check fail where one is out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page is out of date")
    check = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text)
    if stale and check:
        sys.exit("These pages are out of date: run python -m docs.generate.")


if __name__ == "__main__":
    main()
