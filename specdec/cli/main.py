"""`specdec`: one command, its subcommands in groups. Each subcommand is a module with HELP, DESCRIPTION, add_arguments and run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 the work itself failed, 2 wrong or refused input or nobody who serves it, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, unknown = _parser().parse_known_args(words)
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

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
