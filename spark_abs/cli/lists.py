"""Options that take several values: `--tables a b c`."""

from __future__ import annotations

import click

checkpoints_option = click.option(
    "--checkpoints",
    metavar="DIR...",
    multiple=True,
    required=True,
    help="Checkpoint directories of the queries, or patterns such as '/checkpoints/*'.",
)


class Lists(click.Command):
    """A command whose options of several values take all up to the next option: a shell expands `*`.

    These are the options whose metavar ends in three dots.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give each value its option."""
        lists = {
            name
            for option in self.params
            if isinstance(option, click.Option) and str(option.metavar).endswith("...")
            for name in option.opts
        }
        given: list[str] = []
        of, first = "", False
        for arg in args:
            if arg in lists:
                of, first = arg, True
                continue
            if arg.startswith("-"):
                of = ""
            given += [of, arg] if of else [arg]
            first = False
        if first:
            given.append(of)
        return super().parse_args(ctx, given)
