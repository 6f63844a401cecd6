"""What PTX leaves in registers for the matrix products of a later round of a loop.

`ptxas` 12.8 to 13.0 loses some of it: of wgmma products in a loop that read an operand from registers filled before
the loop, it gives the registers to the next accumulator and does not fill them again (seen with two row blocks of 64
and 4 steps; the numbers were plainly wrong on an H200). Operands made within the round, or in shared memory, are safe.
"""

import re
from collections.abc import Iterator

PRODUCT = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\}\s*,\s*\{([^}]*)\}")
TARGET = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
END = re.compile(r"(bra|ret|exit|trap)\b")
# What an instruction writes comes first.
RESULT = re.compile(r"(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)")
WRITES_NONE = re.compile(r"(?:@!?%\w+\s+)?(st|red|cp|bra|mbarrier\.init|mbarrier\.inval)\b")


def kept_operands(ptx: str) -> list[str]:
    """Registers that a wgmma product reads as an operand and, a round later, reads again, not written in between."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    labels = {line[:-1]: place for place, line in enumerate(lines) if line.startswith("$") and line.endswith(":")}
    following = [list(_following(lines, labels, place)) for place in range(len(lines))]
    written = [_written(line) for line in lines]
    return [
        register
        for place, line in enumerate(lines)
        if (product := PRODUCT.search(line))
        for register in re.findall(r"%\w+", product[1])
        if _comes_back(place, register, following, written)
    ]


def _following(lines: list[str], labels: dict[str, int], place: int) -> Iterator[int]:
    if target := TARGET.search(lines[place]):
        yield labels[target[1]]
    if not END.match(lines[place]) and place + 1 < len(lines):
        yield place + 1


def _written(line: str) -> set[str]:
    result = None if WRITES_NONE.match(line) else RESULT.match(line)
    return set(re.findall(r"%\w+", result[1])) if result else set()


def _comes_back(start: int, register: str, following: list[list[int]], written: list[set[str]]) -> bool:
    """Whether a path leads from a place back to it without a write to the register."""
    seen: set[int] = set()
    ahead = list(following[start])
    while ahead:
        place = ahead.pop()
        if place == start:
            return True
        if place not in seen and register not in written[place]:
            seen.add(place)
            ahead += following[place]
    return False
