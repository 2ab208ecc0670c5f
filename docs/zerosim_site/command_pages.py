"""The command line's reference: every command with its arguments and options, as the commands themselves know them."""

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import typer.main

from zerosim.cli import app
from zerosim.cli.shell import EXAMPLE
from zerosim_site.page import HIDE, Page

PROGRAM = "zerosim"


def commands() -> dict[str, Any]:
    """The commands by name, in the order in which ``zerosim --help`` lists them."""
    group: Any = typer.main.get_command(app)
    return {name: group.commands[name] for name in group.list_commands(None)}


def commands_page() -> Page:
    """All commands on one page."""
    found = commands()
    rows = [f"| [`{name}`](#{name}) | {_cell(_first(command))} |" for name, command in found.items()]
    lines = [HIDE, "# Command line", "What `zerosim --help` and `zerosim COMMAND --help` say. Wrong input ends a "
             "command with one line and exit code 2.", "\n".join(["| command | what it does |", "|---|---|", *rows])]
    for name, command in found.items():
        lines += list(_told(name, command))
    return Page("commands.md", "Command line", "\n\n".join(lines) + "\n", "commands.md", "Command line")


def _told(name: str, command: Any) -> Iterator[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    types = get_type_hints(inspect.unwrap(command.callback))
    arguments = [_value(parameter, types) for parameter in shown if not _is_option(parameter)]
    yield f"## {name} {{ #{name} }}"
    yield _plain(command.help or "")
    example = (command.epilog or "").removeprefix(EXAMPLE)
    yield f"```text\n{' '.join([PROGRAM, name, '[OPTIONS]', *arguments])}\n$ {example}\n```"
    if shown:
        rows = [_row(parameter, types) for parameter in shown]
        yield "\n".join(["| | what it says | without it |", "|---|---|---|", *rows])


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _value(parameter: Any, types: dict[str, Any]) -> str:
    """The word that stands for the value: as the command names it, or by its type; nothing for a switch."""
    if getattr(parameter, "is_flag", False):
        return ""
    if not _is_option(parameter):
        word = parameter.metavar or parameter.name.upper()
        return str(word) if parameter.required or word.startswith("[") else f"[{word}]"
    asked = types[parameter.name]
    of = next((one for one in get_args(asked) if one is not type(None)), asked)
    return str(parameter.metavar or {int: "INTEGER", float: "NUMBER", str: "TEXT"}[of])


def _row(parameter: Any, types: dict[str, Any]) -> str:
    """One argument or option: how it is written, what it does, its default."""
    value = _value(parameter, types)
    names = [f"{name} {value}".strip() for name in (*parameter.opts, *parameter.secondary_opts)]
    written = ", ".join(f"`{name}`" for name in (names if _is_option(parameter) else [value]))
    words = getattr(parameter, "help", None) or ""
    return f"| {_cell(written, code=True)} | {_cell(words)} | {_default(parameter)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, "", (), []) or (parameter.default is False and not parameter.secondary_opts):
        return ""
    if isinstance(parameter.default, bool):
        return f"`{(parameter.opts if parameter.default else parameter.secondary_opts)[0]}`"
    return f"`{parameter.default}`"


def _first(command: Any) -> str:
    return str((command.help or "").strip().split("\n\n")[0])


def _plain(text: str) -> str:
    """Help as Markdown: its lines are prose."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _cell(text: str, *, code: bool = False) -> str:
    """Text inside a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if code else line.replace("<", "&lt;").replace("*", "\\*")
