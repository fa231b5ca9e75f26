"""The commands of `balanceroute`: their parsers, and the messages of their faults."""

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from shutil import get_terminal_size
from textwrap import shorten
from typing import Any, NoReturn

from balanceroute import __version__
from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.topologies import TopologyError, did_you_mean

# The parser of every command: help of a screen, faults in one line, and a word on what may have been meant.

EXAMPLES = {
    "serve": "--batch 256 --prefill http://p0:8000 --decode http://d0:8000 http://d1:8000",
    "pick": "--batch 256 --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000",
    "doctor": "p0:8000 d0:8000 d1:8000",
    "topology check": "gpu-1p1d",
    "topology commands": "gpu-1p1d --role prefill",
    "drain": "http://d0:8000 --wait",
    "hash-key": "< keys.txt",
    "audit": "--decode http://d0:8000 http://d1:8000 --minutes 10",
    "advise": "--proxy http://127.0.0.1:9000 --minutes 10",
    "validate": "--steps steps/ --log loads.jsonl",
    "up": "emulated-2p8d",
    "emulate": "--prefillers 2 --ranks 8 --port 8100",
    "replay": "--target http://127.0.0.1:8000 --trace azure_2023_conv --requests 200",
    "simulate": "--trace azure_2023_conv --requests 2000 --policy jsq,br-h",
    "train": "gbdt --trace azure_2023_conv --out lengths.npz",
    "evaluate": "--trace azure_2023_conv --model lengths.npz",
    "model-router train": "--out weights.npz",
    "model-router evaluate": "--weights weights.npz",
    "schema": "topology > topology.schema.json",
    "completion": "bash > ~/.balanceroute-completion",
}
"""Of each command the words that follow it in an example."""
# The flags that the help of a screen shows first for commands with more flags than that.
_FIRST = {
    "serve": "topology prefill decode discover connector batch model lease-s engine-key-file host port "
    "api-key-file tenants tls-cert tls-key admin-port admin-token-file policy predictor resume queue-limit log",
    "pick": "topology prefill decode discover connector batch model lease-s pick pick-host pick-port "
    "pick-fallbacks host port admin-port admin-token-file policy predictor queue-limit log",
    "up": "topology host port admin-port policy predictor batch queue-limit tenants log load-log",
    "advise": "decode prefill proxy trace minutes ttft-p99 tpot-p95 ranks prefill-servers batch step-base-ms "
    "step-us-per-token prefill-base-ms prefill-us-per-token json",
    "simulate": "trace mix format columns requests skip rate backlog concurrency segments ranks batch "
    "step-base-ms step-us-per-token prefill-servers policy predictor json plots",
}
_MOST_LINES, _FLAG_WIDTH = 40, 26
# What flags of vLLM, vllm-router and SMG are here, where the meaning is another one.
_ELSEWHERE = {
    "--worker-urls": "prefillers and decode engines are named apart: --prefill URL .. --decode URL ..",
    "--vllm-pd-disaggregation": "it is always so here: leave it out",
    "--pd-disaggregation": "it is always so here: leave it out",
    "--intra-node-data-parallel-size": "--decode URL@discover asks the engine",
    "--prometheus-port": "/metrics is on --port and on --admin-port",
    "--max-num-seqs": "that of the engines goes to --batch",
    "--kv-transfer-config": "is of the engines; here --connector NAME",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--uvicorn-log-level": "--log-level",
    "--prefill-selector": "--discover prefill=kubernetes:LABEL=VALUE",
    "--decode-selector": "--discover decode=kubernetes:LABEL=VALUE",
}


class _Help(argparse.Action):
    """`-h` prints a screen, `--help-all` everything."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_help() if self.dest == "help_all" else parser.screen())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations: a new flag must not change what an old line means."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | options | {"add_help": False})
        self.words = self.prog.partition(" ")[2]  # Of the command; empty for the one above all.
        self.add_argument("-h", "--help", action=_Help, help="show this help and exit")
        self.add_argument("--help-all", action=_Help, help="show all flags and exit")

    @property
    def example(self) -> str:
        """A line that works; empty if there is none."""
        words = EXAMPLES.get(self.words)
        return "" if words is None else f"{self.prog} {words}"

    def format_help(self) -> str:
        return super().format_help() + (f"\nexample:\n  {self.example}\n" if self.example else "")

    def screen(self) -> str:
        """Return the help, or a screen of it: the purpose of the command, and its first flags."""
        whole = self.format_help()
        if whole.count("\n") <= _MOST_LINES:
            return whole
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        head = formatter.format_help().splitlines()
        tail = ["", f"all flags: {self.prog} --help-all", f"example:   {self.example}"]
        actions = [one for one in self._actions if not isinstance(one, _Help)]
        if self.words in _FIRST:
            names = ((one.option_strings or [one.dest])[0].removeprefix("--") for one in actions)
            named = dict(zip(names, actions, strict=True))
            actions = [named[name] for name in _FIRST[self.words].split()]
        room = _MOST_LINES - len(head) - len(tail) - 1
        return "\n".join([*head, "", *map(_in_a_line, actions[:room]), *tail, ""])

    def parse_known_args(  # type: ignore[override]  # The base class has overloads for it.
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; surplus words are this command's fault, not that of the one above it."""
        self._refuse_unknown(sys.argv[1:] if args is None else args)
        chosen, left = super().parse_known_args(args, namespace)
        if left:
            hint = ": say --prefill URL .. --decode URL .." if self.words == "serve" else ""
            self.error(f"unrecognized arguments: {' '.join(left)}{hint}")
        return chosen, left

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse a flag that does not exist before one that is missing: it may be that one, misspelt."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        for word in words:
            # Behind the name of a command its own parser judges.
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            flag = word.partition("=")[0]
            # No value of another flag begins so: argparse takes every such word for a flag.
            if flag.startswith("--") and flag not in flags:
                self.error(f"unrecognized arguments: {word}{self._hint(flag, flags)}")

    def _hint(self, flag: str, flags: list[str]) -> str:
        for action in self._get_positional_actions():
            if action.dest == flag.removeprefix("--").replace("-", "_"):
                return f"; write {action.metavar or action.dest} alone"
        if self.words in ("serve", "up") and flag in _ELSEWHERE:
            return f": {_ELSEWHERE[flag]}"
        return did_you_mean(flag, flags)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choice that may have been meant, in place of all of them."""
        if action.choices is not None and value not in action.choices:
            meant = did_you_mean(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant}")

    def error(self, message: str) -> NoReturn:
        """Print the fault in one line; `--help` has the rest."""
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)


def _in_a_line(action: argparse.Action) -> str:
    word = action.metavar or ("WORD" if action.choices else "")
    more = " .." if action.nargs == "+" else ""
    name = f"{action.option_strings[0]} {word}{more}" if action.option_strings else f"{word}"
    # As argparse does: %% is a %, and %(default)s the default.
    text = (action.help or "") % vars(action)
    width = max(get_terminal_size().columns, 60) - _FLAG_WIDTH - 2
    return f"  {name:{_FLAG_WIDTH - 2}} {shorten(text, width, placeholder='…')}"


# Each is a module of `balanceroute.proxy.cli` with an `add_parser`, with _ for -; in the order of the
# help: to serve a fleet, to measure it, to try without engines, to learn.
COMMANDS = (
    "serve",
    "pick",
    "doctor",
    "topology",
    "drain",
    "hash-key",
    "audit",
    "advise",
    "validate",
    "up",
    "emulate",
    "replay",
    "simulate",
    "train",
    "evaluate",
    "model-router",
    "schema",
    "completion",
)


def make_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="balanceroute",
        description="Barrier-aware routing for prefill-decode disaggregated LLM serving.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    choices = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        import_module(f"balanceroute.proxy.cli.{command.replace('-', '_')}").add_parser(choices)
    return parser


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for a fault of the user's input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows no ± gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    # Every matrix here is small: with threads, which numpy's library starts when it is imported, a
    # product takes longer, and far longer where the cores are busy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    words = sys.argv[1:] if arguments is None else arguments
    # Only the command's own imports: the proxy starts without the emulator.
    first = words[0] if words else ""
    wanted = [first] if first in COMMANDS else [] if first == "--version" else COMMANDS
    chosen = make_parser(wanted).parse_args(words, argparse.Namespace(words=tuple(words)))
    try:
        status: int = chosen.run(chosen)
    except (BalanceRouteError, TopologyError, OSError) as error:
        print(f"balanceroute: {_words(error)}", file=sys.stderr)  # noqa: T201 - the command line's answer.
        return 2
    return status


def _words(error: Exception) -> str:
    """Return the fault and its place; Python itself begins with the error's number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
