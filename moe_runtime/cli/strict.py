"""A command that takes an option once, where one value is meant, and finite numbers."""

import math
from collections import Counter
from collections.abc import Container
from typing import Any

import typer
from typer.core import TyperCommand


class StrictCommand(TyperCommand):
    """Refuses what would be dropped without a word: of an option given twice, the first value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words of the command line.

        Raises:
            typer.BadParameter: an option that takes one value has two, or a number is infinite or
                none.
        """
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(given).items():
            takes_many = getattr(option, "multiple", True) or getattr(option, "is_flag", False)
            if times > 1 and option.param_type_name == "option" and not takes_many:
                raise typer.BadParameter(
                    f"expected once, got {times} times; where several values are meant, "
                    "separate them by commas",
                    param_hint=option.opts[0],
                )
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(
                    f"expected a finite number, got {value}", param_hint=param.opts[0]
                )
        return rest


def refuse_given(ctx: typer.Context, names: Container[str], why: str) -> None:
    """Refuses options that would have no effect.

    Args:
        ctx: of the command.
        names: the command's parameters.
        why: goes on after the option's name.

    Raises:
        ValueError: one was given, on the command line or in a configuration file.
    """
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        is_given = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
        if param.name in names and is_given:
            raise ValueError(f"{param.opts[0]} {why}")
