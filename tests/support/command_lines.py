"""Command lines of pages, held against the program's own parser."""

import shlex

import generators

COMMANDS = dict(generators.commands())


def require_sound(line: str) -> None:
    """Refuses words of a line that the program's parser does not know.

    Raises:
        AssertionError: no such command or option, or an option of one value without it.
    """
    words = shlex.split(line.split(" | ")[0].split(" > ")[0])
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    assert name is not None, line
    options = {
        word: param
        for param in COMMANDS[name].params
        for word in (*param.opts, *param.secondary_opts)
    }
    rest = words[len(name.split()) :]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            continue
        option, has_value, _ = word.partition("=")
        assert option in options or option in {"-h", "--help"}, f"{line}: no option {option}"
        if not (has_value or getattr(options.get(option), "is_flag", True)):
            assert rest, f"{line}: {option} without a value"
            rest.pop(0)
