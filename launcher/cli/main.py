"""``zerun``: the verbs, and the one place where an error becomes an exit code.

Only typer is imported here, so that ``zerun --help`` is there at once; each verb imports what it needs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from ..contract.errors import Exit, ZerunError
from ..contract.unwritable import of_oserror
from . import bring, clear, data, describe, discover, execute, keep, launch, login, options, plan, show, watch

app = typer.Typer(
    name="zerun",
    help="Plans, launches, watches and brings home ZeRO-partitioned training on Slurm or plain SSH.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
describe.cluster_verbs.command("discover")(discover.cluster_discover)
app.add_typer(describe.cluster_verbs, name="cluster")
app.command("login")(login.login_verb)
app.command("plan")(plan.plan_verb)
app.command("render")(describe.render_verb)
app.command("submit")(launch.submit_verb)
app.command("ls")(watch.ls_verb)
app.command("status")(watch.status_verb)
app.command("logs")(watch.logs_verb)
app.command("exec")(execute.exec_verb)
app.command("cancel")(launch.cancel_verb)
app.command("wait")(launch.wait_verb)
app.command("collect")(bring.collect_verb)
app.command("resume")(launch.resume_verb)
app.command("rm")(clear.rm_verb)
bring.checkpoint_verbs.command("export")(keep.export_verb)
bring.checkpoint_verbs.command("import")(keep.import_verb)
bring.checkpoint_verbs.command("prune")(keep.prune_verb)
app.add_typer(bring.checkpoint_verbs, name="ckpt")
app.add_typer(data.data_verbs, name="data")

# typer vendors click since 0.26: the class of its usage errors is reached through what typer shows.
_WrongUsage = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        show.data(f"zerun {__version__}")
        raise typer.Exit


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; prints errors and never raises them."""
    _stand_on_streams()
    # Off a terminal nothing is wrapped or cut, so help has no width there.
    width: dict[str, Any] = {} if sys.stdout.isatty() else {"terminal_width": 10_000, "max_content_width": 10_000}
    try:
        result = app(args=options.filled_in(arguments), prog_name="zerun", standalone_mode=False, **width)
        sys.stdout.flush()
    except ZerunError as problem:
        show.error(problem.message, problem.hint)
        return int(problem.exit_code)
    except _WrongUsage as problem:
        return _say_usage(problem)
    except (KeyboardInterrupt, typer.Abort):
        show.note("interrupted")
        return int(Exit.INTERRUPTED)
    except SystemExit as left:
        # typer turns a broken pipe into exit 1, which would read as "the job failed".
        return _leave_quietly() if isinstance(left.__context__, BrokenPipeError) else _number(left.code)
    except BrokenPipeError:
        return _leave_quietly()
    except OSError as problem:
        told = of_oserror(problem)
        show.error(told.message, told.hint)
        return int(told.exit_code)
    return result if isinstance(result, int) else int(Exit.DONE)


def _stand_on_streams() -> None:
    """A shell may start us with stdout or stderr closed (``>&-``): what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name whose bytes are no text is shown escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")


def _number(code: object) -> int:
    return code if isinstance(code, int) else int(Exit.DONE if code is None else Exit.USAGE)


def _say_usage(problem: Any) -> int:
    if type(problem).__name__ == "NoArgsIsHelpError":  # a group alone: its help is the answer
        show.note(problem.format_message())
        return int(Exit.USAGE)
    message = problem.format_message()
    if getattr(problem, "possibilities", None):
        message = f"{problem.message}; did you mean {' or '.join(sorted(problem.possibilities))}?"
    place = problem.ctx.command_path if problem.ctx is not None else "zerun"
    show.error(message, f"{place} --help")
    return int(Exit.USAGE)


def _leave_quietly() -> int:
    """The reader went away (``| head``): nobody is left to tell, and Python must not complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return 128 + 13


if __name__ == "__main__":
    main()
