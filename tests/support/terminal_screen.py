"""What is typed at a terminal, and the lines that stay on it, by rich's control sequences."""

import io
import re


class TypedLines(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_of(written: str) -> list[str]:
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.|\n", written, re.S):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
