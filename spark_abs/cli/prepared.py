"""`spark-abs prepared`: what sinks have prepared on a PostgreSQL server and not ended."""

from __future__ import annotations

import click

from spark_abs.cli.output import Output, duration
from spark_abs.cli.root_command import Context, output_option
from spark_abs.sinks.registry import extra_needed

COLUMNS = (
    ("age", True),
    ("sink", False),
    ("run", True),
    ("checkpoint", True),
    ("mark", False),
    ("gid", False),
)


@click.command
@output_option
@click.option("--service", metavar="NAME", help="A service of pg_service.conf.")
@click.option("--dsn-env", metavar="NAME", help="A variable of the environment with a connection string.")
@click.option("--password-env", metavar="NAME", help="A variable of the environment with the password.")
@click.option("--end", metavar="GID", help="Commit this one if its mark names it, else roll it back.")
def prepared(service: str | None, dsn_env: str | None, password_env: str | None, end: str | None) -> None:
    """List transactions that sinks with `prepared=True` have prepared in a PostgreSQL database.

    The server is that of libpq's environment, PGHOST and so on, if no option says another. What a job has
    left is ended by its next start; what a root that is gone has left, by `--end`. Transactions of others
    are neither listed nor ended.
    """
    with extra_needed():
        from spark_abs.sinks.postgres.prepared import end_one, listed
        from spark_abs.sinks.postgres.sink import Postgres

    ctx = click.get_current_context().ensure_object(Context)
    where = Postgres("spark_abs_marker", service=service, dsn_env=dsn_env, password_env=password_env)
    if end is not None:
        done = end_one(where, end)
        how = "committed" if done.counts else "rolled back"
        ctx.out.result({"ended": done, "how": how}, lambda out: out.line(f"{end} is {how}"))
        return
    found = listed(where)

    def text(out: Output) -> None:
        if not found:
            out.line("nothing is prepared")
            return
        rows = (
            (duration(f.age_ms), f.sink, str(f.run), str(f.checkpoint), _mark(f.root, f.counts), f.gid)
            for f in found
        )
        out.table(COLUMNS, rows)

    ctx.out.result({"prepared": found}, text)


def _mark(root: str, counts: bool) -> str:
    if not root:
        return "there is none: --end rolls it back"
    return "names it: --end commits it" if counts else "does not name it: --end rolls it back"
