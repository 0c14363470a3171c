"""`specdec`: one command, its subcommands in groups. Each subcommand is a module with HELP, DESCRIPTION, add_arguments and run."""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from specdec.cli import advise, bench, bench_step, demo, down, generate, ids_to_text, text_to_ids, top, up
from specdec.errors import SpecdecError
from specdec.runtime.extras import explained

GROUPS: dict[str, dict[str, ModuleType]] = {
    "run": {"demo": demo, "up": up, "down": down},
    "use": {"generate": generate, "tokenize": text_to_ids, "detokenize": ids_to_text},
    "measure": {"top": top, "bench": bench, "advise": advise, "bench-step": bench_step},
}


LIKE = 0.7  # of 1: as like must a name be to be meant


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 the work itself failed, 2 wrong or refused input or nobody who serves it, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    parser.spelled_right(words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.argv = words
    try:
        return int(arguments.run(arguments))
    except SpecdecError as error:
        print(f"specdec {arguments.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (told := explained(error)) is None:
            raise
        print(f"specdec {arguments.command}: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output is gone; nothing is left to say, at exit either
        return 1


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other refusal."""

    commands: Mapping[str, Parser] = {}

    def spelled_right(self, words: Sequence[str]) -> None:
        """Ends with the likest name for a command or flag that nobody knows. Asked first: who mistypes a flag that is required would hear
        that it is missing."""
        if words and self.commands and not words[0].startswith("-"):
            if words[0] in self.commands:
                return self.commands[words[0]].spelled_right(words[1:])
            self.error(f"there is no command {words[0]!r}{_likest(words[0], self.commands)}; commands are {', '.join(self.commands)}")
        shown = [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in word and flag not in self._option_string_actions:
                self.error(f"unrecognized arguments: {flag}{_likest(flag, shown)}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def _likest(name: str, known: Iterable[str]) -> str:
    names = {one.lstrip("-"): one for one in known}
    near = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=LIKE)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def _parser() -> Parser:
    listing = "\n".join(
        f"{group}:\n" + "\n".join(f"  {name:<12} {module.HELP}" for name, module in commands.items()) for group, commands in GROUPS.items()
    )
    parser = Parser(
        prog="specdec",
        usage="specdec COMMAND …",
        description="Speculative decoding as a distributed service.\n\n" + listing,
        epilog="`specdec COMMAND --help` tells a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(prog="specdec", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    for group in GROUPS.values():
        for name, module in group.items():
            command = commands.add_parser(name, description=module.DESCRIPTION, allow_abbrev=False)
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)
    parser.commands = commands.choices
    return parser


if __name__ == "__main__":
    sys.exit(main())
