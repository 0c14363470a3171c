"""`specdec tokenize`: the token ids of a text or a chat."""

from __future__ import annotations

import argparse
import asyncio
import json

from specdec.cli import connection, flags, request
from specdec.errors import SpecdecError

HELP = "the token ids of a text or a chat"
USAGE = "specdec tokenize --endpoint HOST:PORT PROMPT [FLAG …]"
DESCRIPTION = """\
Prints the ids that a request with this prompt would use, as a JSON list: --token-ids of `specdec generate` and `specdec detokenize` takes
it."""
FLAGS = (*request.TEXT, *request.CHAT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    connection.add_arguments(parser)
    flags.add_groups(parser, {"prompt": FLAGS})
    parser.add_argument("--no-special-tokens", action="store_true", help="raw text without the tokenizer's special tokens")
    parser.add_argument("--json", action="store_true", help='an object: {"token_ids": […]}')


def run(arguments: argparse.Namespace) -> int:
    try:
        ids = asyncio.run(_ids(arguments))
    except SpecdecError as error:
        raise flags.named(error, FLAGS, arguments) from error
    print(json.dumps({"token_ids": ids} if arguments.json else ids))
    return 0


async def _ids(arguments: argparse.Namespace) -> list[int]:
    prompt, options = request.prompt_of(arguments), request.chat_options(arguments)
    async with connection.connected(connection.endpoint_of(arguments), arguments) as client:
        return list(await client.tokenize(prompt, add_special_tokens=not arguments.no_special_tokens, **options))
