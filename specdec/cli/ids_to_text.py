"""`specdec detokenize`: the text of token ids."""

from __future__ import annotations

import argparse
import asyncio
import json

from specdec.cli import connection, flags
from specdec.cli.flags import Flag
from specdec.errors import SpecdecError

HELP = "the text of token ids"
USAGE = "specdec detokenize --endpoint HOST:PORT --token-ids JSON [FLAG …]"
DESCRIPTION = (
    "Prints the text of a JSON list of token ids, as `specdec tokenize` prints it; @FILE reads it from a file, @- from standard input."
)
IDS = Flag("--token-ids", "token_ids", "the ids: [1, 2, 3]", "JSON|@FILE", flags.ids, instead_of="ids", required=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    connection.add_arguments(parser)
    flags.add_groups(parser, {"ids": (IDS,)})
    parser.add_argument("--skip-special-tokens", action="store_true", help="leave special tokens out")
    parser.add_argument("--json", action="store_true", help='an object: {"text": "…"}')


def run(arguments: argparse.Namespace) -> int:
    try:
        text = asyncio.run(_text(arguments))
    except SpecdecError as error:
        raise flags.named(error, (IDS,), arguments) from error
    print(json.dumps({"text": text}, ensure_ascii=False) if arguments.json else text)
    return 0


async def _text(arguments: argparse.Namespace) -> str:
    ids = IDS.given(arguments)
    async with connection.connected(connection.endpoint_of(arguments), arguments) as client:
        return str(await client.detokenize(ids, skip_special_tokens=arguments.skip_special_tokens))
