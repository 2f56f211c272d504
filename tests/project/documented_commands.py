"""The commands that the documents show: every line of a fenced `sh` block, split as a shell would."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_STOPS = {"|", ">", ">>", "2>", "&&", ";", "&"}


@dataclass(frozen=True)
class Command:
    """One command of a document, without redirections and pipes."""

    words: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def documented(program: str) -> list[Command]:
    """Every command of all documents, and of the comments at the top of configs, that runs `program`."""
    found = [command for document in DOCUMENTS for command in _in_document(document)]
    found += [command for config in sorted((ROOT / "configs").glob("*.yaml")) for command in _in_comments(config)]
    return [command for command in dict.fromkeys(found) if command.words[0] == program]


def _in_document(document: Path) -> list[Command]:
    text = document.read_text(encoding="utf-8")
    return [
        command
        for block in _BLOCK.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
        for command in _split(line.removeprefix("$ "), document.name)
    ]


def _in_comments(config: Path) -> list[Command]:
    lines = [line[1:].strip() for line in config.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return [command for line in lines if line.startswith("headrace ") for command in _split(line, config.name)]


def _split(line: str, where: str) -> list[Command]:
    words: list[str] = []
    commands: list[Command] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    for word in [*lexer, ";"]:
        if word in _STOPS:
            if words and not commands:
                commands.append(Command(tuple(words), where))
            words = []
        elif words or "=" not in word:  # assignments in front of the program are not its arguments
            words.append(word)
    return commands
